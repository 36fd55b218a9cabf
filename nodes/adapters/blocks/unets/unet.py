"""UNetModel of SD1.5, SD2, SDXL and their ControlNets: residual and transformer blocks, and the layers around them.

The blocks of a UNet for videos are in `video_unet`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .....compile_cache.errors import BypassCode, BypassReason
from .....compile_cache.modules.site import Bypass, Hook, RegionRunner, RegionSite
from .....compile_cache.modules.slots import all_parts
from ...comfyui import chosen_attention
from ...comfyui.transformer_options import ACTIVATIONS_SHAPE, BLOCK_INDEX, OVERRIDE
from ...trust.core_code import derives_from, is_core
from ..common import FEATURES, TOKENS, TRACED_OPTIONS, attention_patch, original
from ..splice import FixedResult, StopHere, StoppedAt, replaced_parts
from . import video_unet

_UNET = "comfy.ldm.modules.diffusionmodules.openaimodel"
_CONTROLNET = "comfy.cldm.cldm"
_ATTENTION = "comfy.ldm.modules.attention"
_CONTEXT = ("b", "m", None)
_EMBEDDING = ("b", None)


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for every block of a UNetModel, or of a ControlNet, which copies its encoder; empty for other models.

    Another pack's subclass of these has core's blocks, so it gets regions too. Its own forward runs eagerly.
    """
    if not is_unet(module):
        return []
    found: list[Hook] = []
    attends = chosen_attention.default() is not None
    for block, name in all_parts(module).items():
        if block is module:  # Compile ControlNet replaced the forward of the ControlNet itself
            continue
        if "forward" in block.__dict__:
            kind = type(block).__name__
            bypass(BypassReason(BypassCode.REPLACED_FORWARD, f"another pack replaced the forward of {kind}"))
        elif is_core(block, _UNET, "ResBlock"):
            if not block.exchange_temb_dims:  # otherwise it is the temporal part of a VideoResBlock
                found.append(_residual(name, block, run))
        elif is_core(block, _UNET, "VideoResBlock"):
            found.append(video_unet.residual(name, block, run, bypass))
        elif is_core(block, _ATTENTION, "SpatialTransformer") and attends:
            found.append(_spatial_transformer(name, block, run))
        elif is_core(block, _ATTENTION, "SpatialVideoTransformer") and attends:
            found.append(video_unet.spatial_transformer(name, block, run, bypass))
        elif is_core(block, _ATTENTION, "BasicTransformerBlock") and attends:
            found.append(_transformer_block(name, block, run, bypass))
    if isinstance(out := getattr(module, "out", None), torch.nn.Sequential):
        found.append(_output(out, run))
    if isinstance(hint := getattr(module, "input_hint_block", None), torch.nn.Sequential):
        found.append(_hint(hint, run))
    return found


def is_unet(module: torch.nn.Module) -> bool:
    """The module is core's UNetModel or ControlNet, or an instance of a subclass."""
    return derives_from(module, _UNET, _CONTROLNET)


def _residual(name: str, block: torch.nn.Module, run: RegionRunner) -> Hook:
    site = RegionSite(name, "ResBlock", block, original, (FEATURES, _EMBEDDING), attends=False)

    def forward(x: torch.Tensor, emb: torch.Tensor) -> Any:
        if x.ndim != 4 or emb.ndim != 2:
            return original(block, x, emb)
        return run(site, x, emb)

    return Hook(block, forward, (site,))


def _transformer_block(name: str, block: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> Hook:
    sites = {chosen_attention.TORCHS: _site_of(name, block, chosen_attention.TORCHS)}

    def forward(x: torch.Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None) -> Any:
        options = {} if transformer_options is None else transformer_options
        patch = attention_patch(options)
        if patch is not None:
            bypass(patch)
        if patch is not None or type(context) is not torch.Tensor:
            return original(block, x, context=context, transformer_options=options)
        chosen = chosen_attention.attention_of(options) or chosen_attention.TORCHS
        if chosen not in sites:
            sites[chosen] = _site_of(name, block, chosen)
        return run(sites[chosen], x, context)

    return Hook(block, forward, tuple(sites.values()))


def _site_of(name: str, block: torch.nn.Module, attention: str) -> RegionSite:
    """The site of the block with one of core's attentions, whose name is part of the kind and thus of the key."""
    if attention == chosen_attention.TORCHS:
        return RegionSite(name, "BasicTransformerBlock", block, _traced_block, (TOKENS, _CONTEXT))
    function = functools.partial(_block_with, functools.partial(chosen_attention.run, attention))
    return RegionSite(name, f"BasicTransformerBlock with {attention}", block, function, (TOKENS, _CONTEXT))


def _traced_block(block: torch.nn.Module, x: torch.Tensor, context: torch.Tensor) -> Any:
    return _block_with(TRACED_OPTIONS[OVERRIDE], block, x, context)


def _block_with(attention: Any, block: torch.nn.Module, x: torch.Tensor, context: torch.Tensor) -> Any:
    return original(block, x, context=context, transformer_options={**TRACED_OPTIONS, OVERRIDE: attention})


def _spatial_transformer(name: str, block: Any, run: RegionRunner) -> Hook:
    """Two regions: before and after the transformer blocks. Both run core's own forward, see `splice`."""
    inner = ("transformer_blocks",)
    before = RegionSite(name, "SpatialTransformer.enter", block, _before, (FEATURES,), inner, attends=False)
    after = RegionSite(name, "SpatialTransformer.exit", block, _after, (FEATURES, TOKENS), inner, attends=False)

    def forward(x: torch.Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None) -> Any:
        options = {} if transformer_options is None else transformer_options
        contexts = context if isinstance(context, list) else [context] * len(block.transformer_blocks)
        options[ACTIVATIONS_SHAPE] = list(x.shape)
        tokens = run(before, x)
        for index, inner in enumerate(block.transformer_blocks):
            options[BLOCK_INDEX] = index
            tokens = inner(tokens, context=contexts[index], transformer_options=options)
        return run(after, x, tokens)

    return Hook(block, forward, (before, after))


def _before(block: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        _with_block(block, StopHere(), x)
    except StoppedAt as reached:
        return reached.x
    raise AssertionError("core's SpatialTransformer did not call its blocks")


def _after(block: Any, x: torch.Tensor, tokens: torch.Tensor) -> Any:
    return _with_block(block, FixedResult(tokens), x)


def _with_block(block: Any, other: torch.nn.Module, x: torch.Tensor) -> Any:
    with replaced_parts(block, {"transformer_blocks": torch.nn.ModuleList([other])}):
        return original(block, x, None, {})


def _output(out: torch.nn.Sequential, run: RegionRunner) -> Hook:
    site = RegionSite("out", "UNetModel.out", out, original, (FEATURES,), attends=False)

    def forward(x: torch.Tensor) -> Any:
        return run(site, x) if x.ndim == 4 else original(out, x)

    return Hook(out, forward, (site,))


def _hint(block: torch.nn.Sequential, run: RegionRunner) -> Hook:
    """The convolutions that read a ControlNet's image. They run at every step."""
    site = RegionSite("input_hint_block", "ControlNet.hint", block, _layers, (FEATURES,), attends=False)
    plain = all(type(layer).__name__ in ("Conv2d", "SiLU") for layer in block)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return run(site, x) if plain and x.ndim == 4 else original(block, x, *args, **kwargs)

    return Hook(block, forward, (site,))


def _layers(block: torch.nn.Sequential, x: torch.Tensor) -> Any:
    return torch.nn.Sequential.forward(block, x)  # type: ignore[no-untyped-call]
