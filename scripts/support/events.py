"""What ComfyUI says over its websocket while a prompt runs.

Needs aiohttp, which every ComfyUI environment has; it is imported when used.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from .client import PATIENCE, Client, History, Prompt

PROGRESS_TEXT = 3
LAST_EVENTS = ("execution_success", "execution_error", "execution_interrupted")


@dataclass(slots=True)
class Events:
    """Everything heard, in order; binary previews are left out."""

    history: History = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """(node id, progress text), as ``PromptServer.send_progress_text`` sent them."""

    def of_type(self, name: str) -> list[dict[str, Any]]:
        """The data of the messages of one type, for example "progress" or "executed"."""
        return [message["data"] for message in self.messages if message["type"] == name]


def run_with_events(client: Client, prompt: Prompt, timeout: float = PATIENCE) -> Events:
    """Like ``client.run``, and listens meanwhile; raises what it raises."""
    return asyncio.run(asyncio.wait_for(_listen(client, prompt, timeout), timeout))


async def _listen(client: Client, prompt: Prompt, timeout: float) -> Events:
    import aiohttp

    heard = Events()
    address = f"{client.url.replace('http', 'ws', 1)}/ws?clientId={client.client_id}"
    # Listening starts before queueing, so that nothing is missed.
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
        prompt_id = await asyncio.to_thread(client.queue, prompt)
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                _add_text(heard, message.data)
            elif message.type == aiohttp.WSMsgType.TEXT:
                data = message.json()
                heard.messages.append(data)
                if data["type"] in LAST_EVENTS and data["data"].get("prompt_id") == prompt_id:
                    break
    heard.history = await asyncio.to_thread(client.wait, prompt_id, timeout)
    return heard


def _add_text(heard: Events, data: bytes) -> None:
    kind, length = struct.unpack_from(">II", data)
    if kind == PROGRESS_TEXT:
        node, text = data[8 : 8 + length], data[8 + length :]
        heard.texts.append((node.decode(), text.decode()))
