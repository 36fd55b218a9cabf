"""Runs prompts on one ComfyUI and hands on its messages and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp

Message = tuple[Any, ...]

CHUNK = 4 * 1024 * 1024  # bytes of a file in one message
LAST = ("execution_success", "execution_error", "execution_interrupted")
_POLL_SECONDS = 1.0  # for the history, should a message of the end be lost


class ComfyUILostError(RuntimeError):
    """ComfyUI ended or does not answer; the prompt may run again elsewhere."""


class ComfyUIClient:
    """The HTTP API and the websocket of one ComfyUI process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._id = uuid.uuid4().hex
        self._session = aiohttp.ClientSession()
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}
        self._running = ""  # the prompt whose previews come: those name none
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Open the websocket. Raises ComfyUILostError."""
        try:
            address = f"{self._url.replace('http', 'ws', 1)}/ws?clientId={self._id}"
            socket = await self._session.ws_connect(address, max_msg_size=0, heartbeat=30)
        except (aiohttp.ClientError, OSError) as error:
            raise ComfyUILostError(f"{self._url}: {error}") from None
        self._reader = asyncio.create_task(self._read(socket))

    async def close(self) -> None:
        """Every prompt that still runs ends with ComfyUILostError."""
        for inbox in self._inboxes.values():
            inbox.put_nowait(("lost",))
        if self._reader is not None:
            self._reader.cancel()
        await self._session.close()

    async def json(self, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, Any]:
        """Status and JSON of a GET, or of a POST if there is a body. Raises ComfyUILostError."""
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(
                "GET" if body is None else "POST", self._url + path, json=body, timeout=limit
            ) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if text.strip() else None
        except (
            aiohttp.ClientError,
            asyncio.TimeoutError,
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError: it is closed
            raise ComfyUILostError(f"{self._url}{path}: {error or type(error).__name__}") from None
        except ValueError:
            return 500, None

    async def queue(self, prompt_id: str, body: Mapping[str, Any], path: str = "/prompt") -> tuple[int, Any]:
        """Queue a prompt under this id, with messages for `follow`. Returns ComfyUI's status and answer."""
        self._inboxes[prompt_id] = asyncio.Queue()
        status, answer = await self.json(path, {**body, "prompt_id": prompt_id, "client_id": self._id})
        if status == 200 and (queued := answer["prompt_id"]) != prompt_id:  # a warm-up's id is ComfyUI's own
            self._inboxes[queued] = self._inboxes.pop(prompt_id)
        return status, answer

    async def follow(self, prompt_id: str) -> AsyncIterator[Message]:
        """("message", type, data), ("binary", bytes), ("file", place, bytes, is_last) and, last, ("entry", history).

        The files that a message names come before it. Raises ComfyUILostError.
        """
        inbox, sent = self._inboxes[prompt_id], set[str]()
        while True:
            try:
                message = await asyncio.wait_for(inbox.get(), _POLL_SECONDS)
            except asyncio.TimeoutError:
                message = ()
            if message[:1] == ("lost",):
                raise ComfyUILostError(f"The ComfyUI that ran prompt {prompt_id} ended.")
            if message[:2] == ("message", "executed"):
                async for part in self._files(message[2].get("output"), sent):
                    yield part
            if message:
                yield message
            if not message or message[1] in LAST:
                entry = await self._entry(prompt_id, is_over=bool(message))
                if entry is not None:
                    async for part in self._files(entry.get("outputs"), sent):
                        yield part
                    yield ("entry", entry)
                    return

    async def leave(self, prompt_id: str, is_over: bool) -> None:
        """Forget a prompt; take it from the queue, or interrupt it, if it is not over."""
        self._inboxes.pop(prompt_id, None)
        if not is_over:
            with contextlib.suppress(ComfyUILostError):
                await self.json("/queue", {"delete": [prompt_id]})
                await self.json("/interrupt", {"prompt_id": prompt_id})

    async def _entry(self, prompt_id: str, is_over: bool) -> dict[str, Any] | None:
        """The history of a prompt. It follows the last message by a moment, so wait for it then."""
        while True:
            _, found = await self.json(f"/history/{prompt_id}")
            if found and prompt_id in found:
                return dict(found[prompt_id])
            if not is_over:
                return None
            await asyncio.sleep(0.02)

    async def _files(self, output: Any, sent: set[str]) -> AsyncIterator[Message]:
        for place in files_in(output):
            name = json.dumps(place, sort_keys=True)
            if name in sent:
                continue
            sent.add(name)
            try:
                async with self._session.get(f"{self._url}/view", params=place) as answer:
                    if answer.status != 200:
                        continue  # a node named a file that it did not write
                    before = b""
                    async for part in answer.content.iter_chunked(CHUNK):
                        if before:
                            yield ("file", place, before, False)
                        before = part
                    yield ("file", place, before, True)
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                raise ComfyUILostError(f"{self._url}/view: {error}") from None

    async def _read(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                self._pass_on(self._running, ("binary", message.data))
            elif message.type == aiohttp.WSMsgType.TEXT:
                content = json.loads(message.data)
                data = content.get("data") or {}
                if content.get("type") == "execution_start":
                    self._running = data.get("prompt_id", "")
                # Messages of packs name no prompt; they belong to the one that runs.
                if content.get("type") != "status":
                    self._pass_on(data.get("prompt_id") or self._running, ("message", content["type"], data))

    def _pass_on(self, prompt_id: str, message: Message) -> None:
        if prompt_id in self._inboxes:
            self._inboxes[prompt_id].put_nowait(message)


def files_in(output: Any) -> Iterator[dict[str, str]]:
    """Each file that an output names and that ComfyUI wrote: `filename`, `subfolder`, `type`."""
    if isinstance(output, Mapping):
        if is_file(output):
            yield {name: str(output.get(name) or "") for name in ("filename", "subfolder", "type")}
        else:
            for value in output.values():
                yield from files_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from files_in(value)


def is_file(output: Mapping[str, Any]) -> bool:
    """A value of an output is a file if it names one in the folder `output` or `temp`."""
    return isinstance(output.get("filename"), str) and output.get("type") in ("output", "temp")


def moved(output: Any, folder: str) -> Any:
    """An output whose files are in the subfolder `folder`, where those of another replica cannot have their names."""
    if isinstance(output, Mapping):
        found = {name: moved(value, folder) for name, value in output.items()}
        if is_file(found):
            found["subfolder"] = "/".join(filter(None, (folder, found.get("subfolder") or "")))
        return found
    return [moved(value, folder) for value in output] if isinstance(output, (list, tuple)) else output
