"""Choose whether the conds of one step (cond and uncond) run as one batch or one after the other.

Core merges them if 1.5 times its memory estimate is below the free memory (`samplers._calc_cond_batch`), so the batch
size may change whenever another program uses memory. The estimate is `model.memory_required`. We replace that method,
and only around the one call in each step that decides about batches: loading a model needs the real estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ....compile_cache.errors import excerpt
from ....compile_cache.regions.slots import swapped

AUTO, MERGE, SPLIT = "auto", "always merge", "always split"
POLICIES = (AUTO, MERGE, SPLIT)

# Fake estimates. For MERGE not 0 but minus infinity: core's test is "less than", and the free memory may be 0.
_ESTIMATES = {MERGE: -math.inf, SPLIT: math.inf}


def wrapper_for(policy: str) -> Callable[..., Any] | None:
    """The wrapper of a policy; None leaves the choice to core. Raises ValueError for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(f"There is no batching '{excerpt(policy)}'. Choose one of: {', '.join(POLICIES)}.")
    return None if policy == AUTO else _with_estimate(_ESTIMATES[policy])


def _with_estimate(estimate: float) -> Callable[..., Any]:
    def wrapper(executor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Another pack may have patched the method too, on the model itself.
        with swapped([(vars(model), "memory_required", lambda *_, **__: estimate)]):
            return executor(model, *args, **kwargs)

    return wrapper
