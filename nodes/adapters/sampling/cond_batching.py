"""Choose whether the conds of one step (cond and uncond) run as one batch or one after the other.

Core merges them if 1.5 times its memory estimate is below the free memory (`samplers._calc_cond_batch`), so the batch
size may change whenever another program uses memory. The estimate is `model.memory_required`. We replace that method,
and only around the one call in each step that decides about batches: loading a model needs the real estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP

from ....compile_cache.errors import excerpt

AUTO, MERGE, SPLIT = "auto", "always merge", "always split"
POLICIES = (AUTO, MERGE, SPLIT)

_KEY = "resolute-batching"
# Fake estimates. For MERGE not 0 but minus infinity: core's test is "less than", and the free memory may be 0.
_ESTIMATES = {MERGE: -math.inf, SPLIT: math.inf}


def apply(patcher: Any, policy: str) -> None:
    """Set the policy of a patcher (our clone); AUTO leaves the choice to core. Raises ValueError if it is unknown."""
    if policy not in POLICIES:
        raise ValueError(f"There is no batching '{excerpt(policy)}'. Choose one of: {', '.join(POLICIES)}.")
    patcher.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, _KEY)
    if policy != AUTO:
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, _KEY, _with_estimate(_ESTIMATES[policy]))


def _with_estimate(estimate: float) -> Callable[..., Any]:
    def wrapper(executor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(model)
        missing = object()
        before = attributes.get("memory_required", missing)  # set if another pack patched the method too
        attributes["memory_required"] = lambda *_, **__: estimate
        try:
            return executor(model, *args, **kwargs)
        finally:
            if before is missing:
                del attributes["memory_required"]
            else:
                attributes["memory_required"] = before

    return wrapper
