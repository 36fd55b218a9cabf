"""The table of video decoders: which of a VAE's methods runs through the cache, and how its blocks become regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .....compile_cache.regions.site import Bypass, Hook, RegionRunner
from . import carried, plain, wan

Decode = Callable[[torch.Tensor], Any]

_BUFFER = "output_buffer"
_SIDE = 4  # cells of the latent that a rehearsal decodes


@dataclass(frozen=True)
class VideoDecoder:
    """A kind of video decoder.

    method: of a first_stage_model; its first argument is the latent. Nothing that the blocks carry over lasts longer
        than a call of it.
    is_of: tells if a module that has the method is of this kind. hooks: the hooks of that module.
    frames: of small latents, whose decodes bring the blocks into every state that any video does, at last the one of a
        picture; empty if there are no states. in_tiles: the method gets one tile of the video after the other, all of a
        few sizes.
    """

    method: str
    is_of: Callable[[torch.nn.Module], bool]
    hooks: Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]
    frames: tuple[int, ...]
    in_tiles: bool = False

    def holder(self, model: Any) -> Any:
        """The module of a first_stage_model that has the method; None if it has no such module."""
        path = self.method.rpartition(".")[0]
        return getattr(model, path, None) if path else model


DECODERS = (
    VideoDecoder("decode", wan.is_vae, wan.hooks, (4, 1)),
    VideoDecoder("decoder.forward", carried.is_decoder, carried.hooks, (5, 2, 1)),
    VideoDecoder("decoder.forward", plain.is_transformer, plain.transformer_hooks, (), True),
    VideoDecoder("decoder.forward", plain.is_cosmos, plain.cosmos_hooks, (5, 1)),
    VideoDecoder("decoder.forward", plain.is_mochi, plain.mochi_hooks, (5, 1)),
)


def method_of(model: Any) -> str | None:
    """The method of a first_stage_model by which it decodes videos; None if its decoder is none of the table."""
    held = ((each, each.holder(model)) for each in DECODERS)
    found = (each for each, module in held if isinstance(module, torch.nn.Module) and each.is_of(module))
    return next((each.method for each in found), None)


def is_known(module: torch.nn.Module) -> bool:
    """A module decodes videos, and is of the table."""
    return _kind_of(module) is not None


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """The hooks of a module that decodes videos; empty for any other module."""
    known = _kind_of(module)
    return [] if known is None else known.hooks(module, run, bypass)


def rehearsal_of(module: torch.nn.Module, latent: torch.Tensor, decode: Decode) -> Callable[[], None] | None:
    """Decodes small latents, by which the blocks of `module` come into every state that they may have.

    decode: the module's own method. None if it decodes no videos, or `latent` is none.
    """
    known = _kind_of(module)
    if known is None or not known.frames or not is_video(latent.shape):
        return None
    shapes = shapes_of_rehearsal(module, latent.shape[1])

    def rehearse() -> None:
        for shape in shapes:
            decode(torch.randn(shape, device=latent.device).to(latent.dtype))

    return rehearse


def shapes_of_rehearsal(module: torch.nn.Module, channels: int, of_picture: bool = False) -> list[tuple[int, ...]]:
    """Shapes of small latents, by which the blocks of `module`, one of the table, come into every state that a video
    may bring them into, or a picture. None where blocks have no states.
    """
    known = _kind_of(module)
    frames = () if known is None else known.frames
    return [(1, channels, each, _SIDE, _SIDE) for each in (frames[-1:] if of_picture else frames)]


def without_buffer(named: Mapping[str, Any]) -> dict[str, Any]:
    """Named arguments of a decode without the tensor into which core lets some decoders write their results."""
    return {name: value for name, value in named.items() if name != _BUFFER}


def may_capture(module: torch.nn.Module, latent: torch.Tensor) -> bool:
    """A capture of a whole video's decode would keep as much memory as the decode needs, and gain next to nothing: it
    is no launches that such a decode waits for.
    """
    known = _kind_of(module)
    return known is None or known.in_tiles or not is_video(latent.shape)


def is_video(latent: Sequence[int]) -> bool:
    """A latent of this shape has more than one frame."""
    return len(latent) == 5 and latent[2] > 1


def _kind_of(module: torch.nn.Module) -> VideoDecoder | None:
    return next((each for each in DECODERS if each.is_of(module)), None)
