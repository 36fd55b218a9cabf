"""The wrappers of a compiled model: around each sampling run, before it loads, around each step and each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP

from ....compile_cache.errors import excerpt
from ....compile_cache.modules.slots import swapped
from ..comfyui import core_compiler
from . import free_captures

# Whether the conds of one step (cond and uncond) run as one batch or one after the other. Core merges them if 1.5 times
# its memory estimate is below the free memory (`samplers._calc_cond_batch`), so the batch size may change whenever
# another program uses memory.
AUTO, MERGE, SPLIT = "auto", "always merge", "always split"
POLICIES = (AUTO, MERGE, SPLIT)
# Fake estimates. For MERGE not 0 but minus infinity: core's test is "less than", and the free memory may be 0.
_ESTIMATES = {MERGE: -math.inf, SPLIT: math.inf}


def wrap_sampling(patcher: Any, batching: str, watched: Callable[..., Any]) -> None:
    """Wrap the sampling runs of `patcher`, our clone; a second compile node replaces the wrappers of the first.

    batching: one of POLICIES. watched: wraps each call of the model. Raises ValueError for an unknown `batching`.
    """
    wrappers = (
        # Some families (MiniMax H3) start core's compiler in `forward`, before the wrappers of the diffusion model and
        # before `_forward`, so only a wrapper around the whole run can switch it off.
        (WrappersMP.OUTER_SAMPLE, "resolute-core-compiler", _without_core_compiler),
        (WrappersMP.PREPARE_SAMPLING, "resolute-memory", free_captures.make_room),
        (WrappersMP.CALC_COND_BATCH, "resolute-batching", batching_wrapper(batching)),
        (WrappersMP.APPLY_MODEL, "resolute-calls", watched),
    )
    for kind, key, wrapper in wrappers:
        set_wrapper(patcher, kind, key, wrapper)


def set_wrapper(patcher: Any, kind: str, key: str, wrapper: Callable[..., Any] | None) -> None:
    """Set the only wrapper with this key. None removes it."""
    patcher.remove_wrappers_with_key(kind, key)
    if wrapper is not None:
        patcher.add_wrapper_with_key(kind, key, wrapper)


def _without_core_compiler(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with core_compiler.switched_off():
        return executor(*args, **kwargs)


def batching_wrapper(policy: str) -> Callable[..., Any] | None:
    """The wrapper of a policy; None leaves the choice to core. Raises ValueError for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(f"There is no batching '{excerpt(policy)}'. Choose one of: {', '.join(POLICIES)}.")
    return None if policy == AUTO else _with_estimate(_ESTIMATES[policy])


def _with_estimate(estimate: float) -> Callable[..., Any]:
    """Fake the estimate only around the call in each step that decides on batches: loading needs the real estimate."""

    def wrapper(executor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Another pack may have patched the method too, on the model itself.
        with swapped([(vars(model), "memory_required", lambda *_, **__: estimate)]):
            return executor(model, *args, **kwargs)

    return wrapper
