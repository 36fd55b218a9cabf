"""Collects ComfyUI's websocket messages while a prompt runs.

Needs aiohttp, which every ComfyUI environment has; imported only when used.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ServerError
from .client import Client, History

PROGRESS_TEXT = 3
LAST_EVENTS = ("execution_success", "execution_error", "execution_interrupted")


@dataclass(slots=True)
class Events:
    """All messages in order, without binary previews."""

    history: History = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """(node id, progress text), as ``PromptServer.send_progress_text`` sent them."""


def follow(
    client: Client, queue: Callable[[], str], timeout: float, say: Callable[[str], None] | None = None
) -> Events:
    """Collect the messages of the prompt that `queue` queues, until it is over. say: gets each text of its nodes.

    Raises what `queue` and ``client.wait`` raise, and ServerError if no server answers.
    """
    return asyncio.run(asyncio.wait_for(_listen(client, queue, timeout, say), timeout))


async def _listen(
    client: Client, queue: Callable[[], str], timeout: float, say: Callable[[str], None] | None
) -> Events:
    import aiohttp

    events, is_running = Events(), False
    address = f"{client.url.replace('http', 'ws', 1)}/ws?clientId={client.client_id}"
    try:
        # Connect before queueing, so that no message is missed.
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
            prompt_id = await asyncio.to_thread(queue)
            async for message in socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    # Texts name no prompt; one prompt runs at a time.
                    if _add_text(events, message.data) and is_running and say is not None:
                        say(events.texts[-1][1])
                elif message.type == aiohttp.WSMsgType.TEXT:
                    data = message.json()
                    events.messages.append(data)
                    if (data.get("data") or {}).get("prompt_id") == prompt_id:
                        is_running = is_running or data["type"] == "execution_start"
                        if data["type"] in LAST_EVENTS:
                            break
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(f"{client.url} does not answer: {error}") from None
    events.history = await asyncio.to_thread(client.wait, prompt_id, timeout)
    return events


def _add_text(events: Events, data: bytes) -> bool:
    kind, length = struct.unpack_from(">II", data)
    if kind != PROGRESS_TEXT:
        return False
    node, text = data[8 : 8 + length], data[8 + length :]
    events.texts.append((node.decode("utf-8", "replace"), text.decode("utf-8", "replace")))
    return True
