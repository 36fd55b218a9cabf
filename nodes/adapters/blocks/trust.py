"""Whose blocks may become regions: ComfyUI's own, those of a declared pack, and classes that a person named."""

from __future__ import annotations

import functools

import torch

from ....compile_cache.config import CacheConfig
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.regions.foreign_code import origin

# Packages whose model classes compute the same from the same inputs: core, and what core itself requires.
KNOWN_PACKAGES = frozenset({"comfy", "comfy_extras", "comfy_kitchen", "torch", "torchvision"})


def why_untrusted(block: torch.nn.Module) -> BypassReason | None:
    """Why a block must run as it is: other code than core's may compute anything. None if it may be a region."""
    if "forward" in vars(block) or origin(type(block).forward) not in {*KNOWN_PACKAGES, origin(type(block))}:
        text = f"another pack replaced the forward of {type(block).__name__}; such blocks run as they are"
        return BypassReason(BypassCode.REPLACED_FORWARD, text)
    for kind in dict.fromkeys(map(type, block.modules())):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__.partition(".")[0] not in KNOWN_PACKAGES and name not in _trusted():
            text = f"another pack wrote {name}, so {type(block).__name__} blocks run as they are; "
            return BypassReason(BypassCode.FOREIGN_MODEL, text + "you can name it in RESOLUTE_TRUSTED_CLASSES")
    return None


@functools.cache
def _trusted() -> frozenset[str]:
    return CacheConfig.from_environment().trusted_classes
