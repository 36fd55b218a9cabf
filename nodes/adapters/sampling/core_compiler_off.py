"""Leave the sampling runs of a compiled model to our compiler.

Some families (MiniMax H3) let core's compiler begin in `forward`, before the wrappers of the diffusion model and before
`_forward`, so it takes a wrapper around the whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import WrappersMP

from ..comfyui import core_compiler

_KEY = "resolute-core-compiler"


def switch_off_while_sampling(patcher: Any) -> None:
    """Keep core's compiler off while `patcher` (a clone of ours) samples."""
    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, _KEY)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, _sample)


def _sample(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with core_compiler.switched_off():
        return executor(*args, **kwargs)
