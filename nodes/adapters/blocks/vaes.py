"""The table of VAEs: which method of one runs through the cache in a role, and how its blocks become regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....compile_cache.keys import Role
from ....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ..foreign.core_code import is_core_class
from . import pictures
from .transformers import recognise
from .videos import carried, plain, wan

_BUFFER = "output_buffer"


@dataclass(frozen=True)
class Coder:
    """A kind of decoder or encoder.

    method: of a first_stage_model; its first argument is the latent, or the pixels. Nothing that the blocks carry over
        lasts longer than a call of it.
    is_of: tells if a module that has the method is of this kind. hooks: the hooks of that module.
    of_videos: it is known for videos, and for pictures as videos of one frame.
    frames: of small inputs, which bring the blocks into every state that any video does, at last the one of a picture;
        empty if there are no states. side: of these inputs. in_tiles: the method gets one tile of the video after the
        other, all of a few sizes.
    """

    role: Role
    method: str
    is_of: Callable[[Any], bool]
    hooks: Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]
    of_videos: bool = True
    frames: tuple[int, ...] = ()
    side: int = 4
    in_tiles: bool = False

    def holder(self, model: Any) -> Any:
        """The module of a first_stage_model that has the method; None if it has no such module."""
        path = self.method.rpartition(".")[0]
        found = getattr(model, path, None) if path else model
        return found if isinstance(found, torch.nn.Module) else None

    def small(self, channels: int, of_picture: bool = False) -> list[tuple[int, ...]]:
        """Shapes of small inputs that bring the blocks into every state that a video may bring them into, or a picture;
        empty where blocks have no states.
        """
        return [(1, channels, each, self.side, self.side) for each in self.frames[-1 if of_picture else 0 :]]

    def rehearsal_of(self, given: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Callable[[], None] | None:
        """Runs small inputs, by which the blocks come into every state that they may have; None if there are no states.

        given: the latent, or the pixels; None if it is no video. run: the module's own method.
        """
        if not self.frames or not _is_video(given):
            return None

        def rehearse() -> None:
            for shape in self.small(given.shape[1]):
                run(torch.randn(shape, device=given.device).to(given.dtype))

        return rehearse

    def may_capture(self, given: torch.Tensor) -> bool:
        """A capture of a whole video's decode would keep as much memory as the decode needs, and gain next to nothing:
        such a decode is not launch-bound.
        """
        return not self.of_videos or self.in_tiles or not _is_video(given)


def _is_video(given: torch.Tensor) -> bool:
    """An input of this shape has more than one frame."""
    return given.ndim == 5 and given.shape[2] > 1


def _class(where: str, name: str) -> Callable[[Any], bool]:
    return lambda module: is_core_class(type(module), where, name)


_OF_DECODER, _OF_ENCODER = "decoder.forward", "encoder.forward"
CODERS = (
    Coder(Role.VAE_DECODE, _OF_DECODER, pictures.is_decoder, pictures.hooks, of_videos=False),
    Coder(Role.VAE_ENCODE, _OF_ENCODER, pictures.is_encoder, pictures.hooks, of_videos=False),
    Coder(Role.VAE_DECODE, "decode", wan.decodes, wan.decoder_hooks, frames=(4, 1)),
    Coder(Role.VAE_ENCODE, "encode", wan.encodes, wan.encoder_hooks, frames=(9, 5), side=64),
    Coder(Role.VAE_DECODE, _OF_DECODER, carried.is_decoder, carried.hooks, frames=(5, 2, 1)),
    Coder(
        Role.VAE_DECODE, _OF_DECODER, _class("comfy.ldm.minimax.vae", "ViT3DDecoder"), recognise.hooks, in_tiles=True
    ),
    Coder(
        Role.VAE_DECODE, _OF_DECODER, _class(plain.COSMOS, "DecoderFactorized"), plain.cosmos_hooks, frames=(5, 1)
    ),
    Coder(Role.VAE_DECODE, _OF_DECODER, _class(plain.MOCHI, "Decoder"), plain.mochi_hooks, frames=(5, 1)),
)  # fmt: skip


def method_of(model: Any, role: Role) -> str | None:
    """The method of a first_stage_model by which it decodes or encodes; None if it is none of the table."""
    held = ((each, each.holder(model)) for each in CODERS if each.role is role)
    return next((each.method for each, module in held if module is not None and each.is_of(module)), None)


def coder_of(module: torch.nn.Module, role: Role) -> Coder | None:
    """The row of a module that has the method; None if it is none of the table."""
    return next((each for each in CODERS if each.role is role and each.is_of(module)), None)


def without_buffer(named: Mapping[str, Any]) -> dict[str, Any]:
    """Named arguments of a decode without the tensor into which core lets some decoders write their results."""
    return {name: value for name, value in named.items() if name != _BUFFER}
