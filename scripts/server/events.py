"""Collects ComfyUI's websocket messages while a prompt runs.

Needs aiohttp, which every ComfyUI environment has; imported only when used.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from .client import PROMPT_TIMEOUT, Client, History, Prompt

PROGRESS_TEXT = 3
LAST_EVENTS = ("execution_success", "execution_error", "execution_interrupted")


@dataclass(slots=True)
class Events:
    """All messages in order, without binary previews."""

    history: History = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """(node id, progress text), as ``PromptServer.send_progress_text`` sent them."""

    def of_type(self, name: str) -> list[dict[str, Any]]:
        """The data of the messages of one type, for example "progress" or "executed"."""
        return [message["data"] for message in self.messages if message["type"] == name]


def run_with_events(client: Client, prompt: Prompt, timeout: float = PROMPT_TIMEOUT) -> Events:
    """Run a prompt like ``client.run`` and collect its messages. Raises what ``client.run`` raises."""
    return asyncio.run(asyncio.wait_for(_listen(client, prompt, timeout), timeout))


async def _listen(client: Client, prompt: Prompt, timeout: float) -> Events:
    import aiohttp

    events = Events()
    address = f"{client.url.replace('http', 'ws', 1)}/ws?clientId={client.client_id}"
    # Connect before queueing, so that no message is missed.
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
        prompt_id = await asyncio.to_thread(client.queue, prompt)
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                _add_text(events, message.data)
            elif message.type == aiohttp.WSMsgType.TEXT:
                data = message.json()
                events.messages.append(data)
                if data["type"] in LAST_EVENTS and data["data"].get("prompt_id") == prompt_id:
                    break
    events.history = await asyncio.to_thread(client.wait, prompt_id, timeout)
    return events


def _add_text(events: Events, data: bytes) -> None:
    kind, length = struct.unpack_from(">II", data)
    if kind == PROGRESS_TEXT:
        node, text = data[8 : 8 + length], data[8 + length :]
        events.texts.append((node.decode(), text.decode()))
