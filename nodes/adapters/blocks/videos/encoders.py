"""The encoders of Wan 2.1 (also Qwen-Image's) and of Wan 2.2.

Their blocks carry frames as the decoder's do, see `wan`. One also holds back a frame until it has a second one: then
it returns None, and the encoder with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .....compile_cache.regions.own_memory import own_memory
from .....compile_cache.regions.site import Bypass, Dims, Hook, RegionRunner
from ...foreign.core_code import is_core_class
from ..common import original
from .known import is_video
from .states import FIXED_FRAMES, States
from .wan import FIRST_WAN, SECOND_WAN, is_block, last_norm, with_cache, without_cache

# Frames of small videos, whose encodes bring the blocks into every state that any video does; pixels of their sides.
_FRAMES, _SIDE = (9, 5), 64
# A carried frame of a map that is half as high and wide.
_SMALLER: Dims = ("b", None, None, "h2", "w2")


def method_of(model: Any) -> str | None:
    """The method of a first_stage_model by which it encodes videos, and pictures as videos of one frame; None if its
    encoder is not known.
    """
    return "encode" if isinstance(model, torch.nn.Module) and is_vae(model) else None


def is_vae(module: torch.nn.Module) -> bool:
    """A module is the VAE of Wan 2.1 or of Wan 2.2, with an encoder that holds frames back as this file knows it."""
    encoder = getattr(module, "encoder", None)
    if encoder is None:
        return False
    if is_core_class(type(module), SECOND_WAN, "WanVAE"):
        return is_core_class(type(encoder), SECOND_WAN, "Encoder3d")
    known = is_core_class(type(module), FIRST_WAN, "WanVAE") and is_core_class(type(encoder), FIRST_WAN, "Encoder3d")
    return known and "final" in inspect.signature(type(encoder).forward).parameters  # absent in 0.8


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of the encoder; empty for any other module."""
    if not is_vae(module):
        return []
    encoder = module.get_submodule("encoder")
    found: list[Hook] = []
    # Numbers of frames in the parts after the first. Wan 2.1's blocks may get one at the end.
    first_wan = is_core_class(type(module), FIRST_WAN, "WanVAE")
    later = [1, 2] if first_wan else [1, 2, 4]
    for name, block in encoder.named_modules(prefix="encoder"):
        mode = getattr(block, "mode", "")
        if is_block(block, "ResidualBlock"):
            places = sum(type(part).__name__ == "CausalConv3d" for part in block.get_submodule("residual").children())
            found.append(with_cache(name, block, run, places, later, first_wan))
        elif is_block(block, "Resample") and mode == "downsample2d":
            found.append(without_cache(name, block, run, original, later))
        elif is_block(block, "Resample") and mode == "downsample3d":
            found.append(_downsampling_in_time(name, block, run))
        elif is_block(block, "AttentionBlock"):
            found.append(without_cache(name, block, run, original, later, attends=True))
    return [*found, *last_norm(encoder, run, later, "encoder.head.0")]


def rehearsal_of(
    module: torch.nn.Module, pixels: torch.Tensor, encode: Callable[[torch.Tensor], Any]
) -> Callable[[], None] | None:
    """Encodes small videos, by which the blocks of `module` come into every state that they may have.

    encode: the module's own method. None if it encodes no videos, or `pixels` are none.
    """
    if not is_vae(module) or not is_video(pixels.shape):
        return None

    def rehearse() -> None:
        for frames in _FRAMES:
            shape = (1, pixels.shape[1], frames, _SIDE, _SIDE)
            encode(torch.randn(shape, device=pixels.device).to(pixels.dtype))

    return rehearse


def may_capture(module: torch.nn.Module, pixels: torch.Tensor) -> bool:
    """Not a whole video: see the decoder's."""
    return not is_vae(module) or not is_video(pixels.shape)


def _downsampling_in_time(name: str, block: torch.nn.Module, run: RegionRunner) -> Hook:
    """The hook of a block that makes one frame of two.

    It has a place for the last frame that it saw. Wan 2.1's has a second one, for a frame that it holds back until it
    can give two; `final` says that no second one comes.
    """
    holds_back = is_core_class(type(block), FIRST_WAN, "Resample")
    states = States(name, block)

    def at_once(x: torch.Tensor) -> Any:
        return run(states.get(f"first of {x.shape[2]}", original, (FIXED_FRAMES,)), x)

    def halved(x: torch.Tensor, before: torch.Tensor) -> Any:
        return run(states.get(f"next of {x.shape[2]}", _halved, (FIXED_FRAMES, _SMALLER)), x, before)

    states.add("first of 1", original, (FIXED_FRAMES,))
    for frames in (2,) if holds_back else (2, 4):
        states.add(f"next of {frames}", _halved, (FIXED_FRAMES, _SMALLER))

    def forward(x: torch.Tensor, feat_cache: Any = None, feat_idx: Any = None, final: bool = False) -> Any:
        if feat_cache is None:
            return at_once(x)
        place = feat_idx[0]
        feat_idx[0] += 2 if holds_back else 1
        before = feat_cache[place]
        if before is None:
            feat_cache[place] = result = at_once(x)
            return result
        result, feat_cache[place] = halved(x, before[:, :, -1:])
        if not holds_back:
            return result
        held, feat_cache[place + 1] = feat_cache[place + 1], None
        if held is not None:
            result = torch.cat([held, result], 2)
        if result.shape[2] > 1 or final:
            return result
        feat_cache[place + 1] = result
        return None

    return Hook(block, forward, states.sites)


def _halved(block: torch.nn.Module, x: torch.Tensor, before: torch.Tensor) -> Any:
    """The function of a site: half as many frames, and the frame that it carries over."""
    cache: list[Any] = [before, None]
    final = {"final": True} if is_core_class(type(block), FIRST_WAN, "Resample") else {}
    result = original(block, x, cache, [0], **final)
    return result, own_memory(cache[0])
