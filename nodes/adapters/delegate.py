"""A clone whose weights stay where they are.

With DynamicVRAM, ComfyUI's default on NVIDIA, weights are paged in per operation and have no stable address. Core's way
out, `clone(disable_dynamic=True)`, reads the file again and builds a second model on *every* call. Here that happens
once per loaded model: later clones share the first one's.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from . import compat

logger = logging.getLogger(__name__)

# The original model -> what `clone(model_override=...)` takes. The delegate lives as long as the original does.
_delegates: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def static_clone(patcher: Any, dtype: torch.dtype | None = None) -> Any:
    """A clone of a model patcher with ordinary weights, where ComfyUI can make one; else a plain clone.

    `dtype`: what the weights are computed in, where the loader leaves them as they are in the file because paging
    casts them on the way (a VAE's). A plain clone of a paging patcher still samples: its weights are then a counted
    reason against compiling.
    """
    if not compat.is_dynamic(patcher) or not compat.supports_static_clone(patcher):
        return patcher.clone()
    override = _delegates.get(patcher.model)
    if override is not None:
        return patcher.clone(disable_dynamic=True, model_override=override)
    if getattr(patcher, "cached_patcher_init", None) is None:
        logger.warning(
            "Resolute: the loader of %s gives no way around DynamicVRAM, so it cannot be compiled; "
            "use one of core's loaders, or start ComfyUI with --disable-dynamic-vram",
            type(patcher.model).__name__,
        )
        return patcher.clone()
    clone = patcher.clone(disable_dynamic=True)
    if dtype is not None:
        clone.model.to(dtype)
    _delegates[patcher.model] = clone.get_clone_model_override()
    return clone
