"""The decoders of Wan 2.1 (also Qwen-Image's) and of Wan 2.2.

Their blocks get a list `feat_cache`, in which each causal convolution has a place for the last two frames that it saw,
and an index into it. A place is None before the first frame. The upsampling in time also has the text "Rep" there,
after the first frame, which it does not double. Core passes the frames of a video in parts: one, then two by two (Wan
2.1) or one by one (Wan 2.2), which the upsampling doubles. So the numbers of frames are few, and fixed in a region.
Wan 2.1's blocks get no list with a picture.
"""

from __future__ import annotations

from typing import Any

import torch

from .....compile_cache.regions.own_memory import own_memory
from .....compile_cache.regions.site import Bypass, Hook, RegionRunner, RegionSite
from ...foreign.core_code import is_core, is_core_class
from ..common import original
from .states import FIXED_FRAMES, States, bound

FIRST_WAN, SECOND_WAN = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"
_CARRIED = 2  # frames that a causal convolution of three frames needs from before

# The states of a block: it carries nothing, has nothing carried over yet, or has something.
_ALONE, _FIRST, _NEXT = "alone", "first", "next"
_REPEATED = "Rep"


def is_vae(module: torch.nn.Module) -> bool:
    """A module is the VAE of Wan 2.1 or of Wan 2.2."""
    wheres = [where for where in (FIRST_WAN, SECOND_WAN) if is_core_class(type(module), where, "WanVAE")]
    return any(is_core_class(type(module.get_submodule("decoder")), where, "Decoder3d") for where in wheres)


def hooks(vae: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of the decoder."""
    decoder = vae.get_submodule("decoder")
    found: list[Hook] = []
    goes_by_twos = hasattr(decoder, "run_up")
    later = [1, 2] if goes_by_twos else [1]  # numbers of frames in the parts after the first
    for name, block in decoder.named_modules(prefix="decoder"):
        if is_block(block, "ResidualBlock"):
            places = sum(type(part).__name__ == "CausalConv3d" for part in block.get_submodule("residual").children())
            found.append(with_cache(name, block, run, places, later, goes_by_twos))
        elif is_block(block, "Resample") and getattr(block, "mode", "") == "upsample3d":
            found.append(with_cache(name, block, run, 1, later, goes_by_twos))
            later = [2] if goes_by_twos else [2 * frames for frames in later]
        elif is_block(block, "Resample") and getattr(block, "mode", "") == "upsample2d":
            found.append(without_cache(name, block, run, original, later))
        elif is_block(block, "AttentionBlock"):
            found.append(without_cache(name, block, run, original, later, attends=True))
    return [*found, *last_norm(decoder, run, later, "decoder.head.0")]


def is_block(block: torch.nn.Module, kind: str) -> bool:
    """A block is of this class of Wan 2.1's or Wan 2.2's."""
    return is_core(block, FIRST_WAN, kind) or is_core(block, SECOND_WAN, kind)


def without_cache(
    name: str, block: torch.nn.Module, run: RegionRunner, function: Any, later: list[int], attends: bool = False
) -> Hook:
    """A block that carries nothing over. later: see `hooks`."""
    states = States(name, block, attends)

    def site(frames: int) -> RegionSite:
        return states.get(f"of {frames}", function, (FIXED_FRAMES,))

    for frames in {1, *later}:
        site(frames)
    return Hook(block, lambda x, *args, **kwargs: run(site(x.shape[2]), x), states.sites)


def with_cache(
    name: str, block: torch.nn.Module, run: RegionRunner, places: int, later: list[int], alone: bool
) -> Hook:
    """A block with this many places in the list. A place has two states: empty, or two frames.

    later: see `hooks`. alone: pictures come without a list. Then nothing is copied to be carried over.
    """
    states = States(name, block)

    def without_list(frames: int) -> RegionSite:
        return states.get(f"{_ALONE} of {frames}", original, (FIXED_FRAMES,))

    def site(state: str, frames: int) -> RegionSite:
        carried = places if state == _NEXT else 0
        return states.get(f"{state} of {frames}", bound(_run, places, state), (FIXED_FRAMES,) * (1 + carried))

    doubles = type(block).__name__ == "Resample"
    if alone or doubles:
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
        feat_cache[place : place + places] = before = [None] * places  # nothing else holds what the region frees
        if doubles and missing:  # as without a list
            result, carried_over = run(without_list(x.shape[2]), x), [_REPEATED]
        else:
            result, carried_over = run(site(_FIRST if missing else _NEXT, x.shape[2]), x, *given)
        feat_cache[place : place + places] = carried_over
        feat_idx[0] += places
        return result

    return Hook(block, forward, states.sites)


def _two_frames(before: Any, x: torch.Tensor) -> torch.Tensor:
    """The content of a place, as two frames. A convolution takes zeros for the frames that are missing."""
    if isinstance(before, str):
        return x.new_zeros((*x.shape[:2], _CARRIED, *x.shape[3:]))
    carried: torch.Tensor = before
    missing = _CARRIED - carried.shape[2]
    if missing <= 0:
        return carried
    return torch.cat([carried.new_zeros((*carried.shape[:2], missing, *carried.shape[3:])), carried], 2)


def _run(places: int, state: str, block: torch.nn.Module, x: torch.Tensor, *before: torch.Tensor) -> Any:
    """The function of a site: the block's result, and the frames that it carries over."""
    cache = _Cache(before if state == _NEXT else [None] * places)
    result = original(block, x, cache, [0])
    return result, list(cache)


class _Cache(list[Any]):
    """A list that copies what the block puts there: else the region would return parts of larger tensors."""

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, own_memory(value) if isinstance(value, torch.Tensor) else value)


def last_norm(coder: torch.nn.Module, run: RegionRunner, later: list[int], name: str) -> list[Hook]:
    """The last norm of a decoder or an encoder with the SiLU after it as one region. Core calls the two in turn, as
    parts of `head`.
    """
    head = coder.get_submodule("head")
    norm, silu = head[0], head[1]  # type: ignore[index]
    if not (is_core(norm, FIRST_WAN, "RMS_norm") and type(silu) is torch.nn.SiLU and "forward" not in vars(silu)):
        return []
    both = without_cache(name, norm, run, _norm_and_silu, later)
    # With equal sites, whatever leaves out one of the two leaves out the other.
    return [both, Hook(silu, lambda x: x, both.sites)]


def _norm_and_silu(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(original(norm, x))
