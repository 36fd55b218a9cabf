"""Flux: its double stream and single stream blocks. The simplest family: CONTRIBUTING.md uses it as the example."""

from __future__ import annotations

from typing import Any

import torch

from ....compile_cache.regions.region import Hook, RegionRunner, RegionSite
from ..comfyui import version
from .common import TRACED_OPTIONS, Bypass, attention_patch, is_core, original

_LAYERS = "comfy.ldm.flux.layers"

# Image tokens, text tokens, the modulation vector, and the rotary matrices of all tokens together.
_IMAGE = ("b", "n", None)
_TEXT = ("b", "m", None)
_VECTOR = ("b", None)
_ROTARY = ("b", None, "l", None, None, None)


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of Flux, and of models built from core's Flux blocks; empty for other models."""
    if not version.attention_is_traceable():
        return []
    found: list[Hook] = []
    for name, block in module.named_modules():
        if is_core(block, _LAYERS, "DoubleStreamBlock"):
            site = RegionSite(name, "DoubleStreamBlock", block, _double, (_IMAGE, _TEXT, _VECTOR, _ROTARY))
            found.append(_block(site, ("img", "txt", "vec", "pe"), run, bypass))
        elif is_core(block, _LAYERS, "SingleStreamBlock"):
            site = RegionSite(name, "SingleStreamBlock", block, _single, (_IMAGE, _VECTOR, _ROTARY))
            found.append(_block(site, ("x", "vec", "pe"), run, bypass))
    return found


def _block(site: RegionSite, names: tuple[str, ...], run: RegionRunner, bypass: Bypass) -> Hook:
    block = site.module

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        patch = attention_patch(given.get("transformer_options") or {})
        if patch is not None:
            bypass(patch)
        # Calls with a mask, or with modulation per range of tokens (reference latents), run core's code.
        extra = [key for key in given if key not in (*names, "transformer_options") and given[key] is not None]
        tensors: list[Any] = [given.get(name) for name in names]
        if patch is not None or extra or len(args) > len(names) or any(type(t) is not torch.Tensor for t in tensors):
            return original(block, *args, **kwargs)
        return run(site, *tensors)

    return Hook(block, forward, (site,))


# Core's blocks add to their inputs in place. A region must not write to its inputs, so these work on clones.


def _double(block: Any, img: torch.Tensor, txt: torch.Tensor, vec: torch.Tensor, pe: torch.Tensor) -> Any:
    return original(block, img.clone(), txt.clone(), vec, pe, transformer_options=dict(TRACED_OPTIONS))


def _single(block: Any, x: torch.Tensor, vec: torch.Tensor, pe: torch.Tensor) -> Any:
    return original(block, x.clone(), vec, pe, transformer_options=dict(TRACED_OPTIONS))
