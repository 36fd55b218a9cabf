"""The decoder of LTX and LTX-2.

Each causal convolution keeps the last frames of a part of the video in a dictionary, keyed by thread, until the next
part. In the first part it returns fewer frames than it gets, perhaps none, and in the last part more. Core manages this
state: its code of a causal convolution runs eagerly, except the inner convolution, which belongs to the next region. So
a region has one input of any number of frames, and no state.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .....compile_cache.errors import BypassCode, BypassReason
from .....compile_cache.modules.own_memory import own_memory
from .....compile_cache.modules.site import Bypass, Dims, Hook, RegionRunner
from .....compile_cache.modules.slots import swapped
from ...trust.core_code import is_core, is_core_class
from ..common import original
from ..splice import FixedResult, StoppedAt, replaced_parts
from .channels_last import channels_last
from .states import FIXED_FRAMES, FRAMES, SINGLE, States, by_frames

_WHERE = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
_CONVOLUTION = "comfy.ldm.lightricks.vae.causal_conv3d"
_TIME: Dims = ("b", None, None, None, None)

# The regions of a residual block: up to its first convolution, from there to the second, and the second.
_ENTER, _MIDDLE, _EXIT = "enter", "middle", "exit"


def is_decoder(module: torch.nn.Module) -> bool:
    """The module is core's decoder of LTX."""
    return is_core_class(type(module), _WHERE, "Decoder")


def hooks(decoder: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the residual blocks of the decoder, its upsampling, its other convolutions and its last norm."""
    found: list[Hook] = []
    for name, block in decoder.named_modules():
        if name in ("conv_in", "conv_out") and is_core(block, _CONVOLUTION, "CausalConv3d"):
            found.append(_convolution(name, block, run))
        if is_core(block, _WHERE, "DepthToSpaceUpsample") and is_core(block.conv, _CONVOLUTION, "CausalConv3d"):
            found += _upsampling(name, block, run)
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


def _convolution(name: str, convolution: Any, run: RegionRunner) -> Hook:
    states = States(name, convolution)
    site = states.get("", _convolve, (FRAMES,))

    def forward(x: torch.Tensor, causal: bool = True) -> Any:
        frames = _frames_for(convolution, x, causal)
        return run(site, frames) if isinstance(frames, torch.Tensor) else frames.empty

    return Hook(convolution, forward, states.sites)


def _convolve(convolution: Any, frames: torch.Tensor) -> torch.Tensor:
    """The result of a causal convolution. frames: see `_frames_for`."""
    result: torch.Tensor = convolution.conv(frames)
    return result


def _upsampling(name: str, block: Any, run: RegionRunner) -> list[Hook]:
    """The convolution is a region. The rest runs eagerly: it folds channels into pixels and adds the delayed input."""
    convolution = _convolution(f"{name}.conv", block.conv, run)

    def forward(x: torch.Tensor, causal: bool = True, timestep: torch.Tensor | None = None) -> Any:
        convolved = FixedResult(block.conv(x, causal=causal))
        with replaced_parts(block, {"conv": convolved}), channels_last(x):
            result = original(block, x, causal, timestep)
        _copy_kept_frames(block)
        return result

    # The hooks have equal sites, so leaving out one of them leaves out the other.
    return [convolution, Hook(block, forward, convolution.sites)]


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
    """A convolution has too few frames so far. empty: its result, without frames."""

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
    """The input of the inner convolution: the kept frames, then x. Core's code keeps the frames for the next part."""
    given: list[torch.Tensor] = []

    def record(frames: torch.Tensor) -> torch.Tensor:
        given.append(frames)
        return frames

    with swapped([(vars(convolution.conv), "forward", record)]), channels_last(x):
        result = original(convolution, x, causal)
    _copy_kept_frames(convolution)
    return given.pop() if given else _NoFrames(result)


def _enter(block: torch.nn.Module, x: torch.Tensor, *time: torch.Tensor) -> torch.Tensor:
    """The input of the first convolution."""
    return _until(block, "conv1", x, time)


def _middle(block: Any, frames: torch.Tensor, *time: torch.Tensor) -> torch.Tensor:
    """The input of the second convolution. frames: see `_frames_for`, for the first convolution."""
    h = block.conv1.conv(frames)
    with replaced_parts(block, {"conv1": FixedResult(h), "norm1": _Pass()}):
        return _until(block, "conv2", h, time)


def _exit(block: Any, frames: torch.Tensor) -> torch.Tensor:
    """The result of the second convolution. frames: see `_frames_for`."""
    return _convolve(block.conv2, frames)


def _until(block: torch.nn.Module, convolution: str, x: torch.Tensor, time: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with replaced_parts(block, {convolution: _Stop()}):
        try:
            original(block, x, True, *time)
        except StoppedAt as stopped:
            return stopped.x
    raise AssertionError(f"the block did not call its {convolution}")


def _add_input(block: Any, x: torch.Tensor, h: torch.Tensor, causal: bool) -> Any:
    """Add the block's input, delayed, to the result h of the second convolution, by core's own code."""
    others = {
        "conv1": FixedResult(h),
        **dict.fromkeys(("norm1", "norm2", "non_linearity", "dropout", "conv2"), _Pass()),
    }
    with replaced_parts(block, others), swapped([(vars(block), "timestep_conditioning", False)]):
        result = original(block, x, causal)
    _copy_kept_frames(block)
    return result


def _copy_kept_frames(module: Any) -> None:
    """Copy the frames that core keeps for the next part: core keeps two views, and each keeps a whole map alive."""
    states: dict[int, Any] = getattr(module, "temporal_cache_state", {})
    thread = threading.get_ident()
    if isinstance(kept := states.get(thread), tuple):
        states[thread] = tuple(map(_owned, kept))
    elif kept is not None:
        states[thread] = _owned(kept)


def _owned(kept: Any) -> Any:
    if not isinstance(kept, torch.Tensor) or kept.untyped_storage().nbytes() <= kept.numel() * kept.element_size():
        return kept
    return own_memory(kept)
