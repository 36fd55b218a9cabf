"""Video decoders whose blocks carry no frames over: Cosmos, Mochi."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .....compile_cache.modules.site import Bypass, Hook, RegionRunner
from .....compile_cache.modules.slots import swapped
from ...trust.core_code import is_core
from ..common import original
from .states import by_frames

COSMOS = "comfy.ldm.cosmos.cosmos_tokenizer.layers3d"
MOCHI = "comfy.ldm.genmo.vae.model"


def cosmos_hooks(decoder: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of Cosmos' decoder."""
    found: list[Hook] = []
    for name, block in decoder.named_modules():
        if (
            is_core(block, COSMOS, "CausalResnetBlockFactorized3d")
            or name == "norm_out"
            or (is_core(block, COSMOS, "CausalHybridUpsample3d") and any(True for _ in block.children()))
        ):
            found.append(by_frames(name, block, run, original))
        elif any(is_core(block, COSMOS, kind) for kind in ("CausalAttnBlock", "CausalTemporalAttnBlock")):
            found.append(by_frames(name, block, run, original, attends=True))
    return found


def mochi_hooks(decoder: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the residual blocks of Mochi's decoder; those with attention run eagerly."""
    return [
        by_frames(name, block, run, _mochi_block)
        for name, block in decoder.named_modules()
        if is_core(block, MOCHI, "ResBlock") and isinstance(block.attn_block, torch.nn.Identity)
    ]


def _mochi_block(block: torch.nn.Module, x: torch.Tensor) -> Any:
    """The function of a site: the block, with norms over all frames at once. Core's norm loops over eight at a time."""
    norms = [part for part in block.modules() if is_core(part, MOCHI, "GroupNormSpatial")]
    at_once: list[tuple[dict[str, Any], str, Callable[..., Any]]] = [
        (vars(norm), "forward", functools.partial(_norm_of_frames, norm)) for norm in norms
    ]
    with swapped(at_once):
        return original(block, x)


def _norm_of_frames(norm: Any, x: torch.Tensor) -> torch.Tensor:
    batch, channels, frames, height, width = x.shape
    flat = x.transpose(1, 2).reshape(batch * frames, channels, height, width)
    normal: torch.Tensor = super(type(norm), norm).forward(flat)
    return normal.reshape(batch, frames, channels, height, width).transpose(1, 2)
