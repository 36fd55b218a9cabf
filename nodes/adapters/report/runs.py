"""The latest runs of the process, for the panel's timeline; each new one is sent to the open front ends."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from comfy_execution.progress import get_progress_state

from ....compile_cache.telemetry import rows
from ....compile_cache.telemetry.run_summary import Run
from ..comfyui.messages import broadcast

_KEPT = 60
_runs: deque[dict[str, Any]] = deque(maxlen=_KEPT)
_warm_up_prompt: str | None = None  # the prompt whose runs belong to a warm-up


def add(run: Run) -> None:
    """Keep a finished run, and send it to the front ends."""
    plain = {**rows.plain(run), "prompt_id": prompt_now()}
    _runs.append(plain)
    broadcast("run", run=plain)


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """Inside, all runs count as a warm-up's. ComfyUI runs one prompt at a time."""
    global _warm_up_prompt
    begin_warm_up()
    try:
        yield
    finally:
        _warm_up_prompt = None


def begin_warm_up() -> None:
    """Mark the current prompt, and so all its runs, as a warm-up."""
    global _warm_up_prompt
    _warm_up_prompt = prompt_now()


def is_warm_up_prompt() -> bool:
    """True if the runs of the current prompt belong to a warm-up."""
    return prompt_now() == _warm_up_prompt


def prompt_now() -> str:
    """The id of the prompt that runs."""
    found: str = get_progress_state().prompt_id
    return found


def of_this_prompt() -> list[dict[str, Any]]:
    """The runs of the current prompt, oldest first, in the form of `latest`."""
    return [run for run in _runs if run["prompt_id"] == prompt_now()]


def latest() -> list[dict[str, Any]]:
    """The latest runs as plain data, oldest first; those of one prompt have the same `prompt_id`."""
    return list(_runs)
