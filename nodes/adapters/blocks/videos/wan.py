"""The decoders of Wan 2.1 (also Qwen-Image's) and of Wan 2.2.

Their blocks get a list `feat_cache`, in which each causal convolution has a place for the last two frames that it saw,
and an index into it. A place is None before the first frame. The upsampling in time also has the text "Rep" there,
after the first frame, which it does not double.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ...foreign.core_code import is_core, is_core_class
from ..common import original
from .states import FIXED_FRAMES, FRAMES, SINGLE, States, bound, by_frames, kept

FIRST_WAN, SECOND_WAN = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"
_CARRIED = 2  # frames that a causal convolution of three frames needs from before

# The states of a block: nothing carried over and one frame; frames carried over, and several or one.
_FIRST, _NEXT, _SINGLE = "first", "next", SINGLE
_ALONE = "alone"  # a picture, without a list: nothing is carried over
_REPEATED = "Rep"


def is_vae(module: torch.nn.Module) -> bool:
    """A module is the VAE of Wan 2.1 or of Wan 2.2."""
    wheres = [where for where in (FIRST_WAN, SECOND_WAN) if is_core_class(type(module), where, "WanVAE")]
    return any(is_core_class(type(module.get_submodule("decoder")), where, "Decoder3d") for where in wheres)


def hooks(vae: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of the decoder."""
    decoder = vae.get_submodule("decoder")
    found: list[Hook] = []
    states = [_FIRST, _NEXT, _SINGLE]
    for name, block in decoder.named_modules(prefix="decoder"):
        if is_block(block, "ResidualBlock"):
            places = sum(type(part).__name__ == "CausalConv3d" for part in block.get_submodule("residual"))
            found.append(with_cache(name, block, run, places, states))
        elif is_block(block, "Resample") and getattr(block, "mode", "") == "upsample3d":
            found.append(with_cache(name, block, run, 1, states))
            states = [_FIRST, _NEXT]  # from here on, all frames but the first come in twos
        elif is_block(block, "Resample") and getattr(block, "mode", "") == "upsample2d":
            found.append(by_frames(name, block, run, original))
        elif is_block(block, "AttentionBlock"):
            found.append(by_frames(name, block, run, original, attends=True))
    return [*found, *last_norm(decoder, run, "decoder.head.0")]


def is_block(block: torch.nn.Module, kind: str) -> bool:
    """A block is of this class of Wan 2.1's or Wan 2.2's."""
    return is_core(block, FIRST_WAN, kind) or is_core(block, SECOND_WAN, kind)


def with_cache(name: str, block: torch.nn.Module, run: RegionRunner, places: int, known: Sequence[str]) -> Hook:
    """A block with this many places in the list. A place has two states: empty, or two frames. known: the states in
    which core calls the block.
    """
    states = States(name, block)
    for state in known:
        own = FRAMES if state == _NEXT else FIXED_FRAMES
        carried = () if state == _FIRST else (FIXED_FRAMES,) * places
        states.add(state, bound(_run, places, state != _FIRST), (own, *carried))
    alone = states.add(_ALONE, original, (FIXED_FRAMES,))
    doubles = type(block).__name__ == "Resample"

    def forward(x: torch.Tensor, feat_cache: Any = None, feat_idx: Any = None, *args: Any, **kwargs: Any) -> Any:
        if feat_cache is None:
            return run(alone, x) if x.shape[2] == 1 else original(block, x)
        place = feat_idx[0]
        before = feat_cache[place : place + places]
        state = _state_of(x, before)
        if state not in known:
            return original(block, x, feat_cache, feat_idx, *args, **kwargs)
        given = [] if state == _FIRST else [_two_frames(each, x) for each in before]
        result, carried_over = run(states[state], x, *given)
        feat_cache[place : place + places] = [_REPEATED] if doubles and state == _FIRST else carried_over
        feat_idx[0] += places
        return result

    return Hook(block, forward, states.sites)


def _state_of(x: torch.Tensor, before: list[Any]) -> str | None:
    """The state of a block that gets x, with this in its places; None if core calls no block so."""
    is_single = x.shape[2] == 1
    if all(each is None for each in before):
        return _FIRST if is_single else None
    if any(each is None for each in before):
        return None
    return _SINGLE if is_single else _NEXT


def _two_frames(before: Any, x: torch.Tensor) -> torch.Tensor:
    """What a place holds, as two frames. A convolution takes zeros for the frames that are missing."""
    if isinstance(before, str):
        return x.new_zeros((*x.shape[:2], _CARRIED, *x.shape[3:]))
    missing = _CARRIED - before.shape[2]
    if missing <= 0:
        return before
    return torch.cat([before.new_zeros((*before.shape[:2], missing, *before.shape[3:])), before], 2)


def _run(places: int, has_state: bool, block: torch.nn.Module, x: torch.Tensor, *before: torch.Tensor) -> Any:
    """The function of a site: the block's result, and the frames that it carries over."""
    cache: list[Any] = list(before) if has_state else [None] * places
    result = original(block, x, cache, [0])
    return result, kept(cache)


def last_norm(coder: torch.nn.Module, run: RegionRunner, name: str) -> list[Hook]:
    """The last norm of a decoder or an encoder with the SiLU after it as one region. Core calls the two in turn, as
    parts of `head`.
    """
    head = coder.get_submodule("head")
    norm, silu = head[0], head[1]  # type: ignore[index]
    if not (is_core(norm, FIRST_WAN, "RMS_norm") and type(silu) is torch.nn.SiLU and "forward" not in vars(silu)):
        return []
    states = States(name, norm)
    site = states.add("silu", _norm_and_silu, (FRAMES,))
    # With equal sites, whatever leaves out one of the two leaves out the other.
    return [Hook(norm, lambda x: run(site, x), states.sites), Hook(silu, lambda x: x, states.sites)]


def _norm_and_silu(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(original(norm, x))
