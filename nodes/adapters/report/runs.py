"""The latest runs of the process, for the panel's timeline; each new one is sent to the open front ends."""

from __future__ import annotations

from collections import deque
from typing import Any

from comfy_execution.progress import get_progress_state

from ....compile_cache.calls.run_summary import Run
from ..comfyui.messages import broadcast

_KEPT = 60
_runs: deque[dict[str, Any]] = deque(maxlen=_KEPT)


def add(run: Run) -> None:
    """Keep a run that ended."""
    plain = {**run.plain(), "prompt_id": get_progress_state().prompt_id}
    _runs.append(plain)
    broadcast("run", run=plain)


def latest() -> list[dict[str, Any]]:
    """The latest runs as plain data, oldest first; those of one prompt have the same `prompt_id`."""
    return list(_runs)
