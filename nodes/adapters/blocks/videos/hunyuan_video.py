"""The decoders of HunyuanVideo and HunyuanVideo 1.5.

Core decodes a video in parts. Blocks get two lists: each causal convolution pops the frames that the previous part left
for it from the front of the first list, and appends the frames for the next part to the second list. The first list is
None in the first part, and the second list is None in the last part.
"""

from __future__ import annotations

from typing import Any

import torch

from .....compile_cache.modules.site import Bypass, Hook, RegionRunner, RegionSite
from ...trust.core_code import is_core, is_core_class
from ..common import original
from .states import FIXED_FRAMES, FRAMES, States, bound, by_frames

_KL = "comfy.ldm.modules.diffusionmodules.model"
_REFINER = "comfy.ldm.hunyuan_video.vae_refiner"
_CONVOLUTION = "CarriedConv3d"

# The states of a block: it runs the only part of the video, the first, a middle one, or the last. Only first and middle
# parts leave frames for the next part.
_ALONE, _FIRST, _NEXT, _LAST = "alone", "first", "next", "last"
_PART = 2  # latent frames in a part

# Carried frames have a border of one pixel, so their height and width are separate symbols.
_CARRIED = ("b", None, None, "h of carried", "w of carried")


def is_decoder(module: torch.nn.Module) -> bool:
    """The module is core's decoder of HunyuanVideo 1.5, or AutoencoderKL's decoder with convolutions over frames."""
    if is_core_class(type(module), _REFINER, "Decoder"):
        return True
    return is_core_class(type(module), _KL, "Decoder") and not isinstance(module.conv_in, torch.nn.Conv2d)


def hooks(decoder: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of the decoder."""
    found: list[Hook] = []
    frames = _frames_of_first_parts(decoder)
    for name, block in decoder.named_modules():
        if is_core(block, _KL, "ResnetBlock"):
            found.append(_block(name, block, run, 1))
        elif is_core(block, _KL, "Upsample") or is_core(block, _REFINER, "UpSmpl"):
            found.append(_block(name, block, run, 0, frames.get(block, ())))
        elif is_core(block, _KL, "AttnBlock"):
            found.append(by_frames(name, block, run, original, attends=True))
    return [*found, by_frames("norm_out", decoder.get_submodule("norm_out"), run, original)]


def _frames_of_first_parts(decoder: Any) -> dict[torch.nn.Module, tuple[int, ...]]:
    """For each upsampling that doubles all frames of a video except the first: how many frames the first part has
    there, in a picture and in a video. Code for more frames would not serve these.
    """
    levels = decoder.up if is_core_class(type(decoder), _REFINER, "Decoder") else reversed(decoder.up)
    found: dict[torch.nn.Module, tuple[int, ...]] = {}
    frames = _PART
    for level in levels:
        block = getattr(level, "upsample", None)
        if block is not None and _splits_first(block):
            found[block] = (1, frames)
            frames = 2 * frames - 1
    return found


def _splits_first(block: Any) -> bool:
    if is_core(block, _REFINER, "UpSmpl"):
        return bool(block.tus and block.refiner_vae)
    factor = block.scale_factor
    return bool((factor if isinstance(factor, (int, float)) else factor[0]) > 1)


def _block(name: str, block: torch.nn.Module, run: RegionRunner, unused: int, firsts: tuple[int, ...] = ()) -> Hook:
    """A block with convolutions that carry frames over. unused: arguments between x and the lists that must be None.

    firsts: frame counts of the first part that need separate code; empty if one code serves all frame counts.
    """
    convolutions = [part for part in block.children() if is_core(part, _KL, _CONVOLUTION) and _carries(part)]
    states, places = States(name, block), len(convolutions)

    def early(state: str, frames: int) -> RegionSite:
        own = FIXED_FRAMES if firsts else FRAMES
        return states.get(f"{state} of {frames}" if firsts else state, bound(_run, unused, state), (own,))

    def later(state: str) -> RegionSite:
        return states.get(state, bound(_run, unused, state), (FRAMES, *(_CARRIED,) * places))

    for frames in firsts or (1,):
        early(_ALONE, frames)
    if places and not name.startswith("mid."):  # a mid block gets the whole video at once
        early(_FIRST, max(firsts, default=1))
        later(_NEXT)
        later(_LAST)

    def forward(x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        given = dict(zip((*("temb",) * unused, "conv_carry_in", "conv_carry_out"), arguments, strict=False)) | named
        before, after = given.pop("conv_carry_in", None), given.pop("conv_carry_out", None)
        if any(value is not None for value in given.values()):
            return original(block, x, *arguments, **named)
        leaves = after is not None and places > 0
        if before is None or not places:
            result, carried_over = run(early(_FIRST if leaves else _ALONE, x.shape[2]), x)
        else:
            carried = [[before.pop(0)] for _ in range(places)]
            result, carried_over = run(later(_NEXT if leaves else _LAST), x, *carried)
        if after is not None:
            after.extend(carried_over)
        return result

    return Hook(block, forward, states.sites)


def _carries(convolution: Any) -> bool:
    return tuple(convolution.conv.kernel_size) == (3, 3, 3)


def _run(unused: int, state: str, block: torch.nn.Module, x: torch.Tensor, *before: torch.Tensor) -> Any:
    """The function of a site. Returns the block's result, and the frames that it leaves for the next part."""
    after: list[torch.Tensor] = []
    lists = list(before) if state in (_NEXT, _LAST) else None, after if state in (_FIRST, _NEXT) else None
    return original(block, x, *(None,) * unused, *lists), after
