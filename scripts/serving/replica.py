"""The deployment's replica: an actor with one ComfyUI, which it watches, restarts, warms up and reports on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from ray import serve

from ..errors import ServerError
from . import config as settings
from .background import Background
from .comfyui_client import ComfyUIClient, ComfyUILostError, Message, moved
from .readiness import Readiness
from .records import is_used_workflow
from .replica_server import ReplicaServer

logger = logging.getLogger("ray.serve")

USED = "used-workflows.json"  # in the fleet's folder; the ingress writes it
_STARTS = 3  # of ComfyUI in a row that may fail before Serve replaces the replica
_CACHE_SECONDS = 5.0  # for GET /resolute/cache


class Replica:
    """Serve makes it ready only after its constructor: with ComfyUI up, and the most used workflows warm."""

    async def __init__(self, plain: Mapping[str, Any]) -> None:  # type: ignore[misc]
        # Serve awaits it.
        self._config = settings.from_plain(plain)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._process = ReplicaServer(self._config, self._config.folder / "replicas" / self._name)
        self._ready = Readiness()
        self._background = Background()
        self._starts, self._broken, self._is_closing, self._is_ready = 0, "", False, False
        await self._process.start_beside()
        self._client = await self._connected()
        self._watch = asyncio.create_task(self._keep_running())
        await self._warm_most_used()
        self._is_ready = True

    async def run(
        self, body: Mapping[str, Any], *, need: Mapping[str, Any], token: str, path: str = "/prompt"
    ) -> AsyncIterator[Message]:
        """Run one prompt to its end; the caller's end of the call cancels it.

        body: as for `POST /prompt`. need: see `ranking.rank`. token: the prompt's id. path: or "/resolute/warm-up".
        Yields ("refused", status, answer), or ("accepted", replica, answer), then what `ComfyUIClient.follow` yields
        with the files in a subfolder of the replica's name, then ("report", plain). ("lost", why) if ComfyUI ended.
        """
        client, prompt_id, is_over = self._client, token, False
        self._ready.expect(prompt_id, need)
        try:
            status, answer = await client.queue(token, body, path)
            if status != 200:
                is_over = True
                yield ("refused", status, answer)
                return
            prompt_id = answer["prompt_id"]
            yield ("accepted", self._name, answer)
            async for message in client.follow(prompt_id):
                is_over = is_over or message[0] == "entry"
                yield self._renamed(message)
            report = self._ready.ran(prompt_id, need, await self._runs(client), await self._cache(client))
            yield ("report", report)
        except ComfyUILostError as error:
            is_over = True
            yield ("lost", str(error))
        finally:
            self._ready.forget(token)
            # A cancelled call must not wait, so the clean-up is a task of its own.
            self._background.start(client.leave(prompt_id, is_over))

    async def fetch(self, path: str, *, need: Mapping[str, Any]) -> tuple[int, Any]:
        """ComfyUI's answer to a GET whose result is the same on every replica, as /object_info."""
        try:
            return await self._client.json(path)
        except ComfyUILostError as error:
            return 503, {"error": str(error)}

    async def record_routing_stats(self) -> dict[str, Any]:
        """The values that the router ranks by. Serve calls this every `stats_seconds`."""
        with contextlib.suppress(ComfyUILostError):  # `_keep_running` starts it anew
            self._ready.check(await self._cache(self._client))
        processes = {"pid": os.getpid(), "comfyui_pid": self._process.pid, "comfyui": self._process.url}
        return {**self._ready.plain(), "ready": self._is_ready, **processes}

    def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        if self._broken:
            raise RuntimeError(self._broken)

    def __del__(self) -> None:
        """Serve calls it after the replica was drained."""
        self._is_closing = True
        self._process.kill()

    async def _connected(self) -> ComfyUIClient:
        client = ComfyUIClient(self._process.url)
        await client.connect()
        return client

    async def _keep_running(self) -> None:
        """Start ComfyUI anew whenever it ends. Its prompts then run again, elsewhere or here."""
        while True:
            await self._process.wait()
            if self._is_closing:
                return
            logger.warning("ComfyUI of replica %s ended; starting it anew", self._name)
            self._is_ready = False
            self._ready = Readiness()
            await self._client.close()
            try:
                await self._process.start_beside()
                self._client = await self._connected()
            except (ServerError, ComfyUILostError) as error:
                self._starts += 1
                if self._starts >= _STARTS:
                    self._broken = f"ComfyUI did not start {_STARTS} times in a row. {error}"
                    return
                continue
            self._starts = 0
            self._is_ready = True

    async def _warm_most_used(self) -> None:
        for each in _most_used(self._config)[: self._config.warm_workflows]:
            async for message in self.run(
                {"prompt": each["prompt"]}, need=each["need"], token=str(uuid.uuid4()), path="/resolute/warm-up"
            ):
                if message[0] in ("refused", "lost"):
                    logger.warning("replica %s could not warm up a workflow: %s", self._name, message[1:])
        self._ready.started_with(await self._cache(self._client))

    def _renamed(self, message: Message) -> Message:
        if message[:2] == ("message", "executed"):
            return ("message", "executed", moved(message[2], self._name))
        if message[0] == "file":
            return ("file", moved(message[1], self._name), *message[2:])
        if message[0] == "entry":
            return ("entry", {**message[1], "outputs": moved(message[1].get("outputs") or {}, self._name)})
        return message

    async def _cache(self, client: ComfyUIClient) -> Mapping[str, Any]:
        """Empty without Resolute in that ComfyUI."""
        status, answer = await client.json("/resolute/cache", timeout=_CACHE_SECONDS)
        return answer if status == 200 and isinstance(answer, dict) else {}

    async def _runs(self, client: ComfyUIClient) -> list[Mapping[str, Any]]:
        status, answer = await client.json("/resolute/runs")
        return answer["runs"] if status == 200 and isinstance(answer, dict) else []


def _most_used(config: settings.FleetConfig) -> list[dict[str, Any]]:
    path = Path(config.folder / USED)
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read, so nothing is warmed up: %s", path, error)
        return []
    usable = [each for each in found if is_used_workflow(each)] if isinstance(found, list) else []
    if found != usable:
        logger.warning("%s holds what is no used workflow; that is skipped", path)
    return usable
