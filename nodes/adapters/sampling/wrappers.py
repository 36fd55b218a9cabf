"""The wrappers of a compiled model: around each sampling run, before it loads, around each step and each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP

from ..comfyui import core_compiler
from . import cond_batching, memory


def wrap_sampling(patcher: Any, batching: str, watched: Callable[..., Any]) -> None:
    """Wrap the sampling runs of `patcher`, our clone; a second compile node takes the place of the first.

    batching: see `cond_batching`. watched: wraps each call of the model. Raises ValueError for an unknown `batching`.
    """
    wrappers = (
        # Some families (MiniMax H3) let core's compiler begin in `forward`, before the wrappers of the diffusion model
        # and before `_forward`, so it takes a wrapper around the whole run.
        (WrappersMP.OUTER_SAMPLE, "resolute-core-compiler", _without_core_compiler),
        (WrappersMP.PREPARE_SAMPLING, "resolute-memory", memory.make_room),
        (WrappersMP.CALC_COND_BATCH, "resolute-batching", cond_batching.wrapper_for(batching)),
        (WrappersMP.APPLY_MODEL, "resolute-calls", watched),
    )
    for kind, key, wrapper in wrappers:
        set_wrapper(patcher, kind, key, wrapper)


def set_wrapper(patcher: Any, kind: str, key: str, wrapper: Callable[..., Any] | None) -> None:
    """Let `wrapper` be the one with this key. None: there is none."""
    patcher.remove_wrappers_with_key(kind, key)
    if wrapper is not None:
        patcher.add_wrapper_with_key(kind, key, wrapper)


def _without_core_compiler(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with core_compiler.switched_off():
        return executor(*args, **kwargs)
