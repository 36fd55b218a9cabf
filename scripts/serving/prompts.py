"""The prompts of the fleet: one call of a replica for each, from `POST /prompt` to its entry in the history."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError, RequestCancelledError

from . import current_router
from .config import FleetConfig
from .files import Files, RefusedError
from .need import Need, need_of
from .records import Record, Records, is_used_workflow
from .replica import USED

logger = logging.getLogger("ray.serve")

# (client id, message): a str for JSON, bytes for a preview
Send = Callable[[str, "dict[str, Any] | bytes"], None]


@dataclass
class Prompt:
    """A prompt that is not over. first: the first answer, (status, body), once a replica checked the prompt."""

    record: Record
    need: Need
    first: asyncio.Future[tuple[int, dict[str, Any]]]
    client: str = ""
    replica: str = ""
    why: str = ""
    node: str = ""  # that runs now
    is_running: bool = False
    is_interrupted: bool = False
    starts: int = 0
    avoid: list[str] = field(default_factory=list)
    call: Any = None  # of the replica
    task: asyncio.Task[None] | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """The extra data that it was posted with, and its client."""
        given = self.record.body.get("extra_data")
        return {**(given if isinstance(given, Mapping) else {}), **({"client_id": self.client} if self.client else {})}


class Prompts:
    """Runs prompts through a handle of the replicas."""

    def __init__(self, config: FleetConfig, handle: Any, records: Records, files: Files, send: Send) -> None:
        self._config, self._handle, self._records = config, handle, records
        self._files, self._send = files, send
        self.open: dict[str, Prompt] = {}
        self.reports: list[dict[str, Any]] = []  # of prompts that are over: who ran it, why there, was it warm
        self._structures: dict[str, set[str]] = {}  # a chain of `Need` -> digests of its models
        self._used: dict[str, dict[str, Any]] = {}

    def start(self, record: Record) -> Prompt:
        """Begin a prompt that `Records.add` took in."""
        need = need_of(record.body.get("prompt"), self._files.image_size)
        client = str(record.body.get("client_id") or "")
        prompt = Prompt(record, need, asyncio.get_running_loop().create_future(), client)
        self.open[record.prompt_id] = prompt
        prompt.task = asyncio.create_task(self._carry(prompt))
        self._tell_all()
        return prompt

    def interrupt(self, prompt_id: str) -> None:
        """Cancel the call of a prompt; its replica takes it from ComfyUI's queue, or interrupts it."""
        prompt = self.open.get(prompt_id)
        if prompt is not None and not prompt.is_interrupted:
            prompt.is_interrupted = True
            if prompt.call is not None:
                prompt.call.cancel()

    def needs(self, need: Need) -> dict[str, Any]:
        """A need as the router takes it, with the structures that earlier prompts had."""
        known = {each for chain in need.chains for each in self._structures.get(chain, ())}
        return {**need.plain(), "structures": sorted(known)}

    def learn(self, need: Need, report: Mapping[str, Any]) -> None:
        """The structures that a prompt's models had. A chain has those that all prompts with it have in common."""
        found = set(report.get("structures") or ())
        for chain in need.chains:
            self._structures[chain] = self._structures.get(chain, found) & found

    async def _carry(self, prompt: Prompt) -> None:
        entry: dict[str, Any] | None = None
        is_left, message = False, ""
        try:
            while entry is None and not prompt.is_interrupted:
                prompt.starts += 1
                entry = await self._attempt(prompt)
        except asyncio.CancelledError:
            is_left = not prompt.is_interrupted
            if is_left:
                raise  # the ingress ends; its successor starts this prompt again
        except Exception as error:
            logger.exception("prompt %s failed in the ingress", prompt.record.prompt_id)
            message = f"{type(error).__name__}: {error}"
        finally:
            if not is_left:
                self._end(prompt, entry, message)

    async def _attempt(self, prompt: Prompt) -> dict[str, Any] | None:
        """The entry of the prompt, or None if it is to run again."""
        body = {name: value for name, value in prompt.record.body.items() if name != "client_id"}
        need = {**self.needs(prompt.need), "avoid": prompt.avoid}
        lost, parts = "", set[str]()
        entry: dict[str, Any] | None = None
        prompt.call = self._handle.options(stream=True).run.remote(body, need=need, token=prompt.record.prompt_id)
        try:
            async for kind, *rest in prompt.call:
                if kind == "accepted":
                    self._accepted(prompt, *rest)
                elif kind == "refused":
                    return self._refused(prompt, *rest)
                elif kind == "lost":
                    lost = rest[0]
                elif kind == "file":
                    name = json.dumps(rest[0], sort_keys=True)
                    await asyncio.to_thread(self._files.receive, rest[0], rest[1], name not in parts, rest[2])
                    parts.add(name)
                elif kind == "entry":
                    entry = rest[0]
                elif kind == "report":
                    self._reported(prompt, rest[0])
                else:
                    self._pass_on(prompt, kind, *rest)
        except BackPressureError:
            return self._answer_error(prompt, 503, "queue_full", f"{self._config.waiting} prompts wait already.")
        except RequestCancelledError:
            if prompt.is_interrupted:
                return self._failure(prompt, "")
            lost = "Ray Serve cancelled the call."  # as when a client closes its connection before the first answer
        except (RayActorError, ReplicaUnavailableError) as error:
            lost = f"The replica that ran the prompt was lost: {type(error).__name__}."
        except (OSError, RefusedError) as error:
            prompt.call.cancel()
            return self._failure(prompt, f"The ingress could not keep a file of this prompt: {error}")
        if entry is not None:
            return self._own(prompt, entry)
        prompt.is_running = False
        if prompt.starts < self._config.attempts:
            logger.warning("prompt %s runs again: %s", prompt.record.prompt_id, lost)
            prompt.avoid = [prompt.replica] if prompt.replica else []
            return None
        return self._failure(prompt, f"{lost} It was started {prompt.starts} times.")

    def _accepted(self, prompt: Prompt, replica: str, answer: Mapping[str, Any]) -> None:
        prompt.replica, prompt.why = replica, current_router.decision(prompt.record.prompt_id).get("why", "")
        if not prompt.first.done():
            prompt.first.set_result((200, {"node_errors": answer.get("node_errors") or {}}))

    def _refused(self, prompt: Prompt, status: int, answer: Any) -> dict[str, Any] | None:
        """ComfyUI refused the prompt. Perhaps only that replica lacks a model, so the others are asked too."""
        here = current_router.decision(prompt.record.prompt_id).get("replica", "")
        prompt.avoid = [*prompt.avoid, here]
        names = {each["replica"] for each in current_router.replicas()}
        if here and names - set(prompt.avoid):
            prompt.starts -= 1
            return None
        answer = answer if isinstance(answer, dict) else {}
        error = answer.get("error") or f"ComfyUI answered {status}."
        if not isinstance(error, Mapping):
            error = {"type": "refused", "message": str(error), "details": ""}
        if not prompt.first.done():
            prompt.first.set_result((status, {"error": error, "node_errors": answer.get("node_errors") or {}}))
        return self._failure(prompt, f"{error.get('message')} {error.get('details') or ''}".strip())

    def _answer_error(self, prompt: Prompt, status: int, kind: str, message: str) -> dict[str, Any]:
        if not prompt.first.done():
            error = {"type": kind, "message": message, "details": message, "extra_info": {}}
            prompt.first.set_result((status, {"error": error, "node_errors": {}}))
        return self._failure(prompt, message)

    def _pass_on(self, prompt: Prompt, kind: str, *rest: Any) -> None:
        if kind == "binary":
            self._send(prompt.client, rest[0])
            return
        name, data = rest
        if name == "execution_start":
            prompt.is_running = True
        elif name == "executing":
            prompt.node = str(data.get("node") or "")
        self._send(prompt.client, {"type": name, "data": data})

    def _reported(self, prompt: Prompt, report: Mapping[str, Any]) -> None:
        self.learn(prompt.need, report)
        line = {"prompt_id": prompt.record.prompt_id, "replica": prompt.replica, "why": prompt.why, **report}
        self.reports = [*self.reports[-511:], line]
        logger.info("prompt %s ended: %s", prompt.record.prompt_id, report)
        try:
            if prompt.need.shapes:
                self._note_use(prompt)
        except (OSError, sqlite3.Error) as error:  # the picture is there; only new replicas warm up less
            logger.warning("the use of prompt %s was not counted: %s", prompt.record.prompt_id, error)

    def _note_use(self, prompt: Prompt) -> None:
        """Count the workflow, and rewrite the list that new replicas warm up if its beginning changed."""
        key = " | ".join(prompt.need.shapes)
        workflow = {"prompt": prompt.record.body["prompt"], "need": self.needs(prompt.need)}
        self._records.used(key, workflow)
        found = self._records.most_used(self._config.warm_workflows)
        most = [workflow for _, workflow in found if is_used_workflow(workflow)]
        keys = {" | ".join(each["need"]["shapes"]): each for each in most}
        if list(keys) != list(self._used):
            path = self._config.folder / USED
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(most), "utf-8")
            os.replace(partial, path)
            self._used = keys

    def _own(self, prompt: Prompt, entry: dict[str, Any]) -> dict[str, Any]:
        """ComfyUI's entry with the number and the client that this prompt has here."""
        queued: list[Any] = list(entry.get("prompt") or [])
        if len(queued) >= 4 and isinstance(queued[3], Mapping):
            queued[0] = prompt.record.number
            queued[3] = {**queued[3], **({"client_id": prompt.client} if prompt.client else {})}
        return {**entry, "prompt": queued}

    def _failure(self, prompt: Prompt, message: str) -> dict[str, Any]:
        """An entry in ComfyUI's form: the error, or that the prompt was interrupted."""
        node, record = prompt.node, prompt.record
        nodes = record.body.get("prompt")
        content = nodes.get(node) if isinstance(nodes, Mapping) else None
        kind = "execution_interrupted" if prompt.is_interrupted else "execution_error"
        data: dict[str, Any] = {
            "prompt_id": record.prompt_id, "node_id": node, "executed": [], "timestamp": int(time.time() * 1000),
            "node_type": content.get("class_type", "") if isinstance(content, Mapping) else "",
        }  # fmt: skip
        if not prompt.is_interrupted:
            data |= {
                "exception_message": message, "exception_type": "FleetError", "traceback": [],
                "current_inputs": {}, "current_outputs": [],
            }  # fmt: skip
        self._send(prompt.client, {"type": kind, "data": data})
        status = {"status_str": "error", "completed": False, "messages": [[kind, data]]}
        queued: list[Any] = [record.number, record.prompt_id, nodes, prompt.extra, []]
        return {"prompt": queued, "outputs": {}, "status": status, "meta": {}}

    def _end(self, prompt: Prompt, entry: dict[str, Any] | None, message: str) -> None:
        """Keep the entry of a prompt that is over, or its failure for None; then it is over, whatever else fails."""
        record = prompt.record
        try:
            entry = entry if entry is not None else self._failure(prompt, message)
            if prompt.first.done() and prompt.first.result()[0] != 200:
                self._records.drop(record.prompt_id)  # it was never taken in
            else:
                self._records.finish(record.prompt_id, entry)
        except Exception:
            logger.exception("the end of prompt %s was not kept", record.prompt_id)
        finally:
            self.open.pop(record.prompt_id, None)
            if not prompt.first.done():
                prompt.first.set_result((200, {"node_errors": {}}))
            executing = {"node": None, "display_node": None, "prompt_id": record.prompt_id}
            self._send(prompt.client, {"type": "executing", "data": executing})
            self._tell_all()

    def _tell_all(self) -> None:
        self._send("", {"type": "status", "data": {"status": {"exec_info": {"queue_remaining": len(self.open)}}}})
