"""Whether the conditions of one step (cond and uncond) run as one batch or one after the other.

Core merges them where its estimate of their memory fits 1.5 times into what is free, so the batch may flip with other
programs' memory. The estimate is asked for in one place per step; there, and only there, it is answered for core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP

AUTO, MERGE, SPLIT = "auto", "always merge", "always split"
POLICIES = (AUTO, MERGE, SPLIT)

_KEY = "resolute-batching"
_ESTIMATES = {MERGE: -math.inf, SPLIT: math.inf}  # compared with what is free, which may be nothing


def apply(patcher: Any, policy: str) -> None:
    """Give a patcher (a clone of ours) one of POLICIES; `auto` is core's own choice. Raises ValueError."""
    if policy not in POLICIES:
        raise ValueError(f"There is no batching '{policy}'. Choose one of: {', '.join(POLICIES)}.")
    patcher.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, _KEY)
    if policy != AUTO:
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, _KEY, _answering(_ESTIMATES[policy]))


def _answering(estimate: float) -> Callable[..., Any]:
    def wrapper(executor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(model)
        missing = object()
        before = attributes.get("memory_required", missing)  # another pack's object patch
        attributes["memory_required"] = lambda *_, **__: estimate
        try:
            return executor(model, *args, **kwargs)
        finally:
            if before is missing:
                del attributes["memory_required"]
            else:
                attributes["memory_required"] = before

    return wrapper
