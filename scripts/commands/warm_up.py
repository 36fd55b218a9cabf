"""Client of `POST /resolute/warm-up`: post a workflow to a running server, print the progress, and read the report.

Progress comes over ComfyUI's websocket and needs aiohttp, which every ComfyUI environment has. Without aiohttp the
client waits for the end and prints only the report.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import struct
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError, ServerError, SetupError
from ..server.client import Client, History, each_node_error
from ..server.events import LAST_EVENTS, PROGRESS_TEXT

ROUTE = "/resolute/warm-up"
TIMEOUT = 24 * 3600.0  # seconds; Ctrl+C and ComfyUI's own Cancel end it earlier

Say = Callable[[str], None]


# The summary line of a report, for example "1 ready, 2 failed; 1.8 s". Below it is a line for each skipped input.
_SUMMARY = re.compile(r"^(?:\d+ (?:ready|warmed)(?:, )?)*(?:(\d+) failed)?; \d+\.\d s$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FinishedWarmUp:
    """A finished warm-up. texts: what its nodes show. The texts of Warm Up nodes are reports."""

    texts: list[str]

    @property
    def reports(self) -> list[str]:
        return [text for text in self.texts if _SUMMARY.search(text)]

    @property
    def failed(self) -> int:
        """The number of shapes that failed and of connected inputs that were skipped."""
        found = [(text, summary) for text in self.texts if (summary := _SUMMARY.search(text))]
        return sum(int(summary[1] or 0) + text.count("\n", summary.end()) for text, summary in found)


def read_workflow(path: Path) -> Any:
    """The JSON of a workflow file. Raises SetupError if it cannot be read; the server checks its content."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}.") from None


def warm_up(client: Client, workflow: Any, say: Say, sizes: str | None = None) -> FinishedWarmUp:
    """Queue the warm-up of a workflow in API form and wait for its end. Calls `say` with each line of progress.

    sizes: a list of sizes in place of those of the workflow.

    Raises PromptError if the server refuses the workflow or the prompt fails, and ServerError if no server answers.
    """

    def queue() -> str:
        return _queue(client, workflow, say, sizes)

    if importlib.util.find_spec("aiohttp") is None:
        say("No progress is shown: this Python has no aiohttp. Use the Python that runs your ComfyUI.")
        history = client.wait(queue(), TIMEOUT)
    else:
        history = asyncio.run(_follow(client, queue, say))
    return FinishedWarmUp(client.outputs(history, "text"))


def _queue(client: Client, workflow: Any, say: Say, sizes: str | None) -> str:
    asked = {} if sizes is None else {"sizes": sizes}
    try:
        answer = client.post(ROUTE, {"prompt": workflow, "client_id": client.client_id, **asked})
    except urllib.error.HTTPError as error:
        raise PromptError(_refusal(error)) from None
    for item in answer["items"]:
        say(f"to warm up: {item}")
    for sentence in answer["unknown"]:
        say(f"note: {sentence}")
    return str(answer["prompt_id"])


async def _follow(client: Client, queue: Callable[[], str], say: Say) -> History:
    import aiohttp

    address = f"{client.url.replace('http', 'ws', 1)}/ws?clientId={client.client_id}"
    running = False
    try:
        # Connect before queueing, so that no message is missed.
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
            prompt_id = await asyncio.to_thread(queue)
            async for message in socket:
                if message.type == aiohttp.WSMsgType.BINARY and running:
                    _say_progress(message.data, say)
                elif message.type == aiohttp.WSMsgType.TEXT:
                    kind, data = _event(message.json())
                    if data.get("prompt_id") != prompt_id:
                        continue
                    running = running or kind == "execution_start"
                    if kind in LAST_EVENTS:
                        break
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(f"{client.url} does not answer: {error}") from None
    return await asyncio.to_thread(client.wait, prompt_id, TIMEOUT)


def _event(message: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    return message["type"], message.get("data") or {}


def _say_progress(data: bytes, say: Say) -> None:
    """Print the text that a node shows. Only one prompt runs at a time, so the text is ours."""
    kind, length = struct.unpack_from(">II", data)
    if kind == PROGRESS_TEXT:
        say(data[8 + length :].decode("utf-8", "replace"))


def _refusal(error: urllib.error.HTTPError) -> str:
    """Why the server refused the request: the message of our route, or ComfyUI's errors for nodes of the prompt."""
    if error.code in (404, 405):
        return f"The server has no {ROUTE}: install Resolute there, or update it."
    try:
        answer = json.loads(error.read().decode("utf-8", "replace"))
        message = str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server refused the workflow with status {error.code} and gave no reason. See its log."
    return "; ".join([message, *each_node_error(answer.get("node_errors") or {})])
