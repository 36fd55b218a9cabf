"""Texts to warm a model up with, where the user connected none: only their shape matters."""

from __future__ import annotations

from typing import Any

import comfy.model_base
import torch

from ....compile_cache.errors import UserError

_CHUNK = 77  # tokens, as CLIP takes them
_T5_CHUNK = 256  # the fewest tokens that core gives to Flux
_REMEDY = "Connect positive and negative: the texts of your sampler."


def made_up(model: Any, chunks: int, generator: torch.Generator) -> Any:
    """A CONDITIONING for `model` (a ModelPatcher): `chunks` chunks of random text embeddings (1, tokens, width).

    Raises UserError for a model family whose texts have a form that is not known here.
    """
    tokens, width, pooled = _form(model.model, chunks)
    more = {} if pooled is None else {"pooled_output": torch.randn((1, pooled), generator=generator)}
    return [[torch.randn((1, tokens, width), generator=generator), more]]


def _form(base: Any, chunks: int) -> tuple[int, int, int | None]:
    """(tokens, width, width of the pooled embedding or None)."""
    unet = base.diffusion_model
    if isinstance(base, comfy.model_base.Flux):
        parameters = unet.params
        return _T5_CHUNK * chunks, parameters.context_in_dim, parameters.vec_in_dim
    width = base.model_config.unet_config.get("context_dim")
    if isinstance(width, (list, tuple)):  # one for each resolution
        width = next((each for each in width if each), None)
    if not isinstance(width, int) or not _takes_only_text(base):
        raise UserError(f"Resolute cannot make up a text for a {type(base).__name__}. {_REMEDY}")
    return _CHUNK * chunks, width, _pooled_width(base)


def _takes_only_text(base: Any) -> bool:
    image_driven = (comfy.model_base.SVD_img2vid, comfy.model_base.SV3D_u, comfy.model_base.Stable_Zero123)
    return base.latent_format.latent_dimensions == 2 and not isinstance(base, image_driven)


def _pooled_width(base: Any) -> int | None:
    """SDXL appends embeddings of 256 for each of its six sizes (the refiner: five) to the pooled text."""
    for kind, numbers in ((comfy.model_base.SDXLRefiner, 5), (comfy.model_base.SDXL, 6)):
        if isinstance(base, kind):
            width: int = base.adm_channels - numbers * 256
            return width
    return None
