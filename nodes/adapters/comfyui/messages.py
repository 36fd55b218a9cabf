"""Messages over ComfyUI's websocket: the text on one node, and events for the badge and the panel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ....compile_cache.texts import Text, words_of

EVENT = "resolute"
_NO_ID = "00000000-0000-0000-0000-000000000000"  # the id of a workflow that was loaded as a prompt
_KEPT = 500
_latest: dict[tuple[str, str], dict[str, Any]] = {}  # by workflow and node, the latest last
going_on: dict[str, dict[str, Any]] = {}  # current messages of kinds working and coming, for a page loaded now


def show_on_node(text: str, node_id: str | None, workflow: str | None = None) -> None:
    """Put a text on a node; the front end replaces the one that was there. Does nothing without a server.

    workflow: its id, if not the running one's. Words are sent first: ComfyUI's own message carries only a plain string.
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
        keep(text, node_id, running_workflow() if workflow is None else workflow)


def on_node(*texts: str) -> dict[str, Any]:
    """The `ui` output by which the running node shows these texts, with their words; keeps them for a reload."""
    context = getattr(sys.modules.get("comfy_execution.utils"), "get_executing_context", lambda: None)()
    if context is not None:
        keep(Text.joined("\n", texts), context.node_id, running_workflow())
    return {"text": texts, "resolute_words": tuple(words_of(text) for text in texts)}


def broadcast(kind: str, **data: Any) -> None:
    """Send an event to every open front end. kind: text, working, coming, idle, run or freed; data: plain values."""
    server = _server()
    if kind == "working" or data.get("left"):
        going_on[kind] = data
    elif kind != "text":
        going_on.pop("coming" if kind == "coming" else "working", None)
    if server is not None:
        server.send_sync(EVENT, {"kind": kind, **data})


def latest_texts() -> dict[str, dict[str, dict[str, Any]]]:
    """The latest text of each node with its words, by workflow and node: for a page that is loaded anew."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (workflow, node_id), text in list(_latest.items()):
        found.setdefault(workflow, {})[node_id] = text
    return found


def keep(text: str, node_id: str, workflow: str) -> None:
    """Keep a text for `latest_texts`. workflow: its id; nothing is kept for a workflow without one."""
    if workflow and workflow != _NO_ID:
        _latest.pop((workflow, node_id), None)
        _latest[workflow, node_id] = {"text": text, "words": words_of(text)}
        if len(_latest) > _KEPT:
            del _latest[next(iter(_latest))]


def running_workflow() -> str:
    """The id of the workflow whose prompt runs; empty if no prompt runs, or if it was queued without the id."""
    running = getattr(getattr(_server(), "prompt_queue", None), "currently_running", {})
    for _, _, _, extra, *_ in list(running.values()):
        measured = extra.get("resolute_workflow") if isinstance(extra, dict) else None  # by Measure against stock
        value: Any = extra
        for name in ("extra_pnginfo", "workflow", "id"):
            value = value.get(name) if isinstance(value, dict) else None
        return str(value or measured or "")
    return ""


def prompt_runs() -> bool:
    """ComfyUI runs a prompt now."""
    return bool(getattr(getattr(_server(), "prompt_queue", None), "currently_running", None))


def _server() -> Any:
    server = sys.modules.get("server")  # ComfyUI has imported it; in tests of single modules there is none
    return getattr(getattr(server, "PromptServer", None), "instance", None)
