"""The decoders and encoders of Wan 2.1 (also Qwen-Image's) and of Wan 2.2.

Their blocks get a list `feat_cache` and an index into it. Each causal convolution has a place in the list for the last
two frames that it saw. A place is None before the first frame. The upsampling in time does not double the first frame,
and marks its place with the text "Rep" after it. Core passes a video in parts: one frame, then two at a time (Wan 2.1)
or one at a time (Wan 2.2); the upsampling doubles them. So there are few frame counts, and a region has a fixed one.
For a picture, Wan 2.1's blocks get no list.

One block of an encoder also holds back a frame until it has a second one. Meanwhile it and the encoder return None.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .....compile_cache.modules.own_memory import own_memory
from .....compile_cache.modules.site import Bypass, Dims, Hook, RegionRunner, RegionSite
from ...trust.core_code import is_core, is_core_class
from ..common import original
from .channels_last import channels_last
from .states import FIXED_FRAMES, States, bound

_FIRST_WAN, _SECOND_WAN = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"
_CARRIED = 2  # previous frames that a causal convolution over three frames needs

# The states of a block: it gets no list, its places are empty, or its places have frames.
_ALONE, _FIRST, _NEXT = "alone", "first", "next"
_REPEATED = "Rep"

# A carried frame of a map that is half as high and wide.
_SMALLER: Dims = ("b", None, None, "h of half", "w of half")


def decodes(vae: torch.nn.Module) -> bool:
    """The module is the VAE of Wan 2.1 or of Wan 2.2."""
    wheres = [where for where in (_FIRST_WAN, _SECOND_WAN) if is_core_class(type(vae), where, "WanVAE")]
    return any(is_core_class(type(vae.get_submodule("decoder")), where, "Decoder3d") for where in wheres)


def encodes(vae: torch.nn.Module) -> bool:
    """The module is the VAE of Wan 2.1 or of Wan 2.2, and its encoder holds frames back as this file expects."""
    encoder = getattr(vae, "encoder", None)
    if encoder is None:
        return False
    if is_core_class(type(vae), _SECOND_WAN, "WanVAE"):
        return is_core_class(type(encoder), _SECOND_WAN, "Encoder3d")
    known = is_core_class(type(vae), _FIRST_WAN, "WanVAE") and is_core_class(type(encoder), _FIRST_WAN, "Encoder3d")
    return known and "final" in inspect.signature(type(encoder).forward).parameters  # absent in 0.8


def decoder_hooks(vae: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of the decoder."""
    goes_by_twos = hasattr(vae.get_submodule("decoder"), "run_up")
    return _hooks(vae, "decoder", run, [1, 2] if goes_by_twos else [1], goes_by_twos)


def encoder_hooks(vae: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of the encoder. The last part for Wan 2.1's blocks may be one frame."""
    first_wan = is_core_class(type(vae), _FIRST_WAN, "WanVAE")
    return _hooks(vae, "encoder", run, [1, 2] if first_wan else [1, 2, 4], first_wan)


def _hooks(vae: torch.nn.Module, part: str, run: RegionRunner, later: list[int], omits_list: bool) -> list[Hook]:
    """later: frame counts of the parts of a video after the first. omits_list: see `_with_cache`."""
    coder = vae.get_submodule(part)
    found: list[Hook] = []
    for name, block in coder.named_modules(prefix=part):
        mode = getattr(block, "mode", "") if _is_block(block, "Resample") else ""
        if _is_block(block, "ResidualBlock"):
            found.append(
                _with_cache(name, block, run, _convolutions(block.get_submodule("residual")), later, omits_list)
            )
        elif mode == "upsample3d":
            found.append(_with_cache(name, block, run, _convolutions(block), later, omits_list))
            later = [2] if omits_list else [2 * frames for frames in later]
        elif mode == "downsample3d":
            found.append(_downsampling_in_time(name, block, run))
        elif mode in ("upsample2d", "downsample2d"):
            found.append(_without_cache(name, block, run, original, later))
        elif is_core(block, _SECOND_WAN, "DupUp3D"):
            found.append(_duplicating(name, block, run, later))
        elif _is_block(block, "AttentionBlock"):
            found.append(_without_cache(name, block, run, original, later, attends=True))
    return [*found, *_last_norm(coder, run, later, f"{part}.head.0")]


def _is_block(block: torch.nn.Module, kind: str) -> bool:
    """The block is of this class of Wan 2.1's or Wan 2.2's."""
    return is_core(block, _FIRST_WAN, kind) or is_core(block, _SECOND_WAN, kind)


def _convolutions(block: torch.nn.Module) -> list[int]:
    """The channels of the frames that each causal convolution carries over."""
    return [each.in_channels for each in block.children() if type(each).__name__ == "CausalConv3d"]  # type: ignore[misc]


def _without_cache(
    name: str, block: torch.nn.Module, run: RegionRunner, function: Any, later: list[int], attends: bool = False
) -> Hook:
    """The hook of a block that carries no frames over. later: see `_hooks`."""
    states = States(name, block, attends)

    def site(frames: int) -> RegionSite:
        return states.get(f"of {frames}", function, (FIXED_FRAMES,), [(0, frames)])

    for frames in {1, *later}:
        site(frames)
    return Hook(block, lambda x, *args, **kwargs: run(site(x.shape[2]), x), states.sites)


def _duplicating(name: str, block: Any, run: RegionRunner, later: list[int]) -> Hook:
    """The hook of Wan 2.2's shortcut around an upsampling. It carries no frames over, but drops some of the first part.

    later: see `_hooks`.
    """
    states = States(name, block)

    def site(is_first: bool, frames: int) -> RegionSite:
        drops = is_first and block.factor_t > 1
        state = f"{_FIRST if drops else ''} of {frames}".strip()
        return states.get(state, bound(_duplicated, drops), (FIXED_FRAMES,), [(0, frames)])

    site(True, 1)
    for frames in later:
        site(False, frames)
    return Hook(block, lambda x, first_chunk=False: run(site(first_chunk, x.shape[2]), x), states.sites)


def _duplicated(is_first: bool, block: torch.nn.Module, x: torch.Tensor) -> Any:
    return original(block, x, is_first)


def _with_cache(
    name: str, block: torch.nn.Module, run: RegionRunner, channels: list[int], later: list[int], omits_list: bool
) -> Hook:
    """The hook of a block with a place in the list for each entry of `channels`. A place is empty or has two frames.

    later: see `_hooks`. omits_list: core passes no list with a picture, so no frames are copied.
    """
    states, places = States(name, block), len(channels)

    def without_list(frames: int) -> RegionSite:
        return states.get(f"{_ALONE} of {frames}", original, (FIXED_FRAMES,), [(0, frames)])

    def site(state: str, frames: int) -> RegionSite:
        sizes = [(0, frames), *[(count, _CARRIED) for count in channels if state == _NEXT]]
        return states.get(f"{state} of {frames}", bound(_run, places, state), (FIXED_FRAMES,) * len(sizes), sizes)

    doubles = type(block).__name__ == "Resample"
    if omits_list or doubles:
        without_list(1)
    if not doubles:
        site(_FIRST, 1)
    for frames in later:
        site(_NEXT, frames)

    def forward(x: torch.Tensor, feat_cache: Any = None, feat_idx: Any = None, *args: Any, **kwargs: Any) -> Any:
        if feat_cache is None:
            return run(without_list(x.shape[2]), x)
        place = feat_idx[0]
        before = feat_cache[place : place + places]
        missing = sum(each is None for each in before)
        if missing not in (0, places):
            return original(block, x, feat_cache, feat_idx, *args, **kwargs)
        given = [] if missing else [[_two_frames(each, x)] for each in before]
        feat_cache[place : place + places] = before = [None] * places  # drop references to frames that the region frees
        if doubles and missing:  # same code as without a list
            result, carried_over = run(without_list(x.shape[2]), x), [_REPEATED]
        else:
            result, carried_over = run(site(_FIRST if missing else _NEXT, x.shape[2]), x, *given)
        feat_cache[place : place + places] = carried_over
        feat_idx[0] += places
        return result

    return Hook(block, forward, states.sites)


def _two_frames(before: Any, x: torch.Tensor) -> torch.Tensor:
    """The content of a place as two frames. Zeros replace missing frames, as in core's convolution."""
    if isinstance(before, str):
        return x.new_zeros((*x.shape[:2], _CARRIED, *x.shape[3:]))
    carried: torch.Tensor = before
    missing = _CARRIED - carried.shape[2]
    if missing <= 0:
        return carried
    with channels_last(x):
        return torch.cat([carried.new_zeros((*carried.shape[:2], missing, *carried.shape[3:])), carried], 2)


def _run(places: int, state: str, block: torch.nn.Module, x: torch.Tensor, *before: torch.Tensor) -> Any:
    """The function of a site. Returns the block's result, and the frames that it carries over."""
    cache = _Cache(before if state == _NEXT else [None] * places)
    result = original(block, x, cache, [0])
    return result, list(cache)


class _Cache(list[Any]):
    """A list that copies tensors which the block stores; otherwise the region would return views of larger tensors."""

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, own_memory(value) if isinstance(value, torch.Tensor) else value)


def _last_norm(coder: torch.nn.Module, run: RegionRunner, later: list[int], name: str) -> list[Hook]:
    """Hooks that run the last norm of a decoder or encoder and the SiLU after it as one region. Core calls both in turn
    as parts of `head`.
    """
    head = coder.get_submodule("head")
    norm, silu = head[0], head[1]  # type: ignore[index]
    if not (is_core(norm, _FIRST_WAN, "RMS_norm") and type(silu) is torch.nn.SiLU and "forward" not in vars(silu)):
        return []
    both = _without_cache(name, norm, run, _norm_and_silu, later)
    # The hooks have equal sites, so leaving out one of them leaves out the other.
    return [both, Hook(silu, lambda x: x, both.sites)]


def _norm_and_silu(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(original(norm, x))


def _downsampling_in_time(name: str, block: torch.nn.Module, run: RegionRunner) -> Hook:
    """The hook of a block that reduces two frames to one.

    The block has a place for the last frame that it saw. Wan 2.1's has a second place, for a result that it holds back
    until it can return two frames; `final` says that no more frames follow.
    """
    holds_back = is_core_class(type(block), _FIRST_WAN, "Resample")
    states = States(name, block)

    def at_once(x: torch.Tensor) -> Any:
        return run(states.get(f"first of {x.shape[2]}", original, (FIXED_FRAMES,)), x)

    def halved(x: torch.Tensor, before: torch.Tensor) -> Any:
        return run(states.get(f"next of {x.shape[2]}", _halved, (FIXED_FRAMES, _SMALLER)), x, before)

    states.get("first of 1", original, (FIXED_FRAMES,))
    for frames in (2,) if holds_back else (2, 4):
        states.get(f"next of {frames}", _halved, (FIXED_FRAMES, _SMALLER))

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
    """The function of a site. Returns half as many frames, and the frame that it carries over."""
    cache: list[Any] = [before, None]
    final = {"final": True} if is_core_class(type(block), _FIRST_WAN, "Resample") else {}
    result = original(block, x, cache, [0], **final)
    return result, own_memory(cache[0])
