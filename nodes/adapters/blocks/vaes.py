"""The table of VAEs: the method that runs through the cache in a role, and the hooks of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ....compile_cache.keys import Role
from ....compile_cache.modules.site import Bypass, Hook, RegionRunner
from ..trust.core_code import is_core_class
from . import pictures
from .transformers import recognise
from .videos import hunyuan_video, ltx, plain, wan


@dataclass(frozen=True)
class Coder:
    """A kind of decoder or encoder.

    method: dotted name in a first_stage_model; its first argument is the latent, or the pixels. State that the blocks
        carry over ends with the call of the method.
    is_of: returns True for a module of this kind that has the method. hooks: the hooks of that module.
    of_videos: it handles videos, and pictures as videos of one frame.
    in_tiles: each call of the method gets one tile of the video; the tiles have few distinct sizes.
    """

    role: Role
    method: str
    is_of: Callable[[Any], bool]
    hooks: Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]
    of_videos: bool = True
    in_tiles: bool = False

    def holder(self, model: Any) -> Any:
        """The module of a first_stage_model that has the method; None if there is no such module."""
        path = self.method.rpartition(".")[0]
        found = getattr(model, path, None) if path else model
        return found if isinstance(found, torch.nn.Module) else None

    def may_capture(self, given: torch.Tensor) -> bool:
        """False for a whole video: its capture would keep as much memory as the decode needs, and gain next to nothing,
        since such a decode is not launch-bound.
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
    Coder(Role.VAE_DECODE, "decode", wan.decodes, wan.decoder_hooks),
    Coder(Role.VAE_ENCODE, "encode", wan.encodes, wan.encoder_hooks),
    Coder(Role.VAE_DECODE, _OF_DECODER, hunyuan_video.is_decoder, hunyuan_video.hooks),
    Coder(Role.VAE_DECODE, _OF_DECODER, ltx.is_decoder, ltx.hooks),
    Coder(
        Role.VAE_DECODE, _OF_DECODER, _class("comfy.ldm.minimax.vae", "ViT3DDecoder"), recognise.hooks, in_tiles=True
    ),
    Coder(
        Role.VAE_DECODE, _OF_DECODER, _class(plain.COSMOS, "DecoderFactorized"), plain.cosmos_hooks
    ),
    Coder(Role.VAE_DECODE, _OF_DECODER, _class(plain.MOCHI, "Decoder"), plain.mochi_hooks),
)  # fmt: skip


def method_of(model: Any, role: Role) -> str | None:
    """The method by which a first_stage_model decodes or encodes; None if no row of the table matches it."""
    held = ((each, each.holder(model)) for each in CODERS if each.role is role)
    return next((each.method for each, module in held if module is not None and each.is_of(module)), None)


def coder_of(module: torch.nn.Module, role: Role) -> Coder | None:
    """The row of a module that has the method; None if no row of the table matches it."""
    return next((each for each in CODERS if each.role is role and each.is_of(module)), None)
