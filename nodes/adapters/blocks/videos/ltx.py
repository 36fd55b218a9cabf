"""The decoder of LTX and LTX-2.

Each of its causal convolutions keeps the last frames of a part of the video in a dictionary, by thread, until the next
part comes. It gives fewer frames than it gets in the first part, perhaps none, and more in the last. What is kept stays
in core's hands: its code of a convolution runs as it is but for the convolution itself, which belongs to the region
that goes on from there. So a region has one input of any number of frames, and no state.
"""

from __future__ import annotations

from typing import Any

import torch

from .....compile_cache.errors import BypassCode, BypassReason
from .....compile_cache.regions.site import Bypass, Dims, Hook, RegionRunner
from .....compile_cache.regions.slots import swapped
from ...foreign.core_code import is_core, is_core_class
from ..common import original
from ..splice import FixedResult, StoppedAt, in_place
from .states import FIXED_FRAMES, FRAMES, SINGLE, States, by_frames

_WHERE = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
_CONVOLUTION = "comfy.ldm.lightricks.vae.causal_conv3d"
_TIME: Dims = ("b", None, None, None, None)

# The regions of a residual block: up to its first convolution, from there to the second, and the second.
_ENTER, _MIDDLE, _EXIT = "enter", "middle", "exit"


def is_decoder(module: torch.nn.Module) -> bool:
    """A module is core's decoder of LTX."""
    return is_core_class(type(module), _WHERE, "Decoder")


def hooks(decoder: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the residual blocks of the decoder and for its last norm."""
    found: list[Hook] = []
    for name, block in decoder.named_modules():
        if not is_core(block, _WHERE, "ResnetBlock3D"):
            continue
        if block.inject_noise:
            text = (
                "ResnetBlock3D adds random numbers, which compiled code would draw in another order; it runs as it is"
            )
            bypass(BypassReason(BypassCode.PATCHED_BLOCK, text))
        elif all(is_core(part, _CONVOLUTION, "CausalConv3d") for part in (block.conv1, block.conv2)):
            found.append(_residual_block(name, block, run))
    return [*found, by_frames("conv_norm_out", decoder.get_submodule("conv_norm_out"), run, original)]


def _residual_block(name: str, block: Any, run: RegionRunner) -> Hook:
    states = States(name, block)
    times: tuple[Dims, ...] = (_TIME,) if block.timestep_conditioning else ()
    enter = states.get(_ENTER, _enter, (FRAMES, *times))
    single = states.get(f"{_ENTER} {SINGLE}", _enter, (FIXED_FRAMES, *times))
    middle = states.get(_MIDDLE, _middle, (FRAMES, *times))
    leave = states.get(_EXIT, _exit, (FRAMES,))

    def forward(input_tensor: torch.Tensor, causal: bool = True, timestep: torch.Tensor | None = None) -> Any:
        x = input_tensor
        if x.shape[2] == 0 or (timestep is not None) != block.timestep_conditioning:
            return original(block, x, causal, timestep)
        time = () if timestep is None else (timestep,)
        h = run(single if x.shape[2] == 1 else enter, x, *time)
        frames = _frames_for(block.conv1, h, causal)
        h = run(middle, frames, *time) if isinstance(frames, torch.Tensor) else frames.empty
        frames = _frames_for(block.conv2, h, causal)
        del h
        h = run(leave, frames) if isinstance(frames, torch.Tensor) else frames.empty
        del frames
        return _add_input(block, x, h, causal)

    return Hook(block, forward, states.sites)


class _NoFrames:
    """A convolution has too few frames for a result yet. empty: its result."""

    def __init__(self, empty: torch.Tensor) -> None:
        self.empty = empty


class _Stop(torch.nn.Module):
    """Ends the forward at a convolution. Raises StoppedAt."""

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        raise StoppedAt(x, None)


class _Pass(torch.nn.Module):
    """Returns its input."""

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        return x


def _frames_for(convolution: Any, x: torch.Tensor, causal: bool) -> torch.Tensor | _NoFrames:
    """The frames that a causal convolution convolves: x after those that it kept. It keeps what it needs of x."""
    given: list[torch.Tensor] = []

    def record(frames: torch.Tensor) -> torch.Tensor:
        given.append(frames)
        return frames

    with swapped([(vars(convolution.conv), "forward", record)]):
        result = original(convolution, x, causal)
    return given.pop() if given else _NoFrames(result)


def _enter(block: torch.nn.Module, x: torch.Tensor, *time: torch.Tensor) -> torch.Tensor:
    """The input of the first convolution."""
    return _until(block, "conv1", x, time)


def _middle(block: Any, frames: torch.Tensor, *time: torch.Tensor) -> torch.Tensor:
    """The input of the second convolution. frames: what the first one convolves."""
    h = block.conv1.conv(frames)
    with in_place(block, {"conv1": FixedResult(h), "norm1": _Pass()}):
        return _until(block, "conv2", h, time)


def _exit(block: Any, frames: torch.Tensor) -> torch.Tensor:
    """The result of the second convolution. frames: what it convolves."""
    result: torch.Tensor = block.conv2.conv(frames)
    return result


def _until(block: torch.nn.Module, convolution: str, x: torch.Tensor, time: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with in_place(block, {convolution: _Stop()}):
        try:
            original(block, x, True, *time)
        except StoppedAt as stopped:
            return stopped.x
    raise AssertionError(f"the block did not call its {convolution}")


def _add_input(block: Any, x: torch.Tensor, h: torch.Tensor, causal: bool) -> Any:
    """Add the block's input, with a delay, to the result h of the second convolution, as core does after it."""
    others = {
        "conv1": FixedResult(h),
        **dict.fromkeys(("norm1", "norm2", "non_linearity", "dropout", "conv2"), _Pass()),
    }
    with in_place(block, others), swapped([(vars(block), "timestep_conditioning", False)]):
        return original(block, x, causal)
