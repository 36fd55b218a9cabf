"""Run actions when the running prompt ends, in the thread that runs prompts, before ComfyUI starts the next one.

ComfyUI has no callback for that. Its worker calls `task_done` of the queue, so an attribute of the queue replaces that
method until the prompt has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_METHOD = "task_done"
_actions: list[Callable[[], object]] = []


def when_prompt_ends(queue: Any, action: Callable[[], object]) -> bool:
    """Call `action` when the running prompt ends, with any outcome. Returns False if no prompt runs.

    queue: ComfyUI's PromptQueue. An action that is already registered is not added again. Its errors are logged.
    """
    with queue.mutex:
        if not queue.currently_running:
            return False
        if action not in _actions:
            _actions.append(action)
        if not getattr(queue.__dict__.get(_METHOD), "is_ours", False):
            queue.__dict__[_METHOD] = _standing_in(queue, getattr(queue, _METHOD))
        return True


def _standing_in(queue: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def task_done(*args: Any, **kwargs: Any) -> Any:
        with queue.mutex:
            if queue.__dict__.get(_METHOD) is task_done:  # otherwise another pack replaced ours
                del queue.__dict__[_METHOD]
            actions, _actions[:] = list(_actions), []
        for action in actions:
            try:
                action()
            except Exception:
                logger.warning("Resolute: what was left for the end of the prompt failed", exc_info=True)
        return original(*args, **kwargs)

    task_done.is_ours = True  # type: ignore[attr-defined]
    return task_done
