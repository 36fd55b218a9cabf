"""Messages over ComfyUI's websocket: the text on one node, and what the badge and the panel show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ....compile_cache.texts import Text, words_of

EVENT = "resolute"


def show_on_node(text: str, node_id: str | None) -> None:
    """Put a text on a node; the front end replaces the one that was there. Does nothing without a server.

    The words of a Text go before it, since ComfyUI's message has room for a plain string only.
    """
    server = _server()
    pack: Any = sys.modules.get(__name__.rpartition(".nodes.")[0])
    for folder in getattr(pack, "other_copies", ()):
        names = {"other": Path(folder).name, "own": Path(pack.__path__[0]).name}
        twice = Text("Resolute is installed twice: delete {other} or {own}", **names)
        text = Text.joined("\n", [twice, text])  # first: a node has room for three lines
    if node_id is not None and server is not None and hasattr(server, "send_progress_text"):
        if isinstance(text, Text):
            broadcast("text", text=text, words=text.words)
        server.send_progress_text(text, node_id)


def on_node(*texts: str) -> dict[str, Any]:
    """The `ui` of a node that shows these texts, with their words."""
    return {"text": texts, "resolute_words": tuple(words_of(text) for text in texts)}


def broadcast(kind: str, **data: Any) -> None:
    """Send an event to every open front end. kind: text, working, idle, run, freed or warmed; data: plain values."""
    server = _server()
    if server is not None:
        server.send_sync(EVENT, {"kind": kind, **data})


def prompt_runs() -> bool:
    """ComfyUI runs a prompt now."""
    return bool(getattr(getattr(_server(), "prompt_queue", None), "currently_running", None))


def _server() -> Any:
    server = sys.modules.get("server")  # ComfyUI has imported it; in tests of single modules there is none
    return getattr(getattr(server, "PromptServer", None), "instance", None)
