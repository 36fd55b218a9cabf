"""Random conditioning for a warm-up without connected conditioning. Only its shape matters."""

from __future__ import annotations

from typing import Any

import comfy.model_base
import torch

from ....compile_cache.errors import UserError

_CHUNK = 77  # tokens in one chunk of CLIP's
_T5_CHUNK = 256  # core pads Flux's T5 embeddings to at least this many tokens
_REMEDY = "Connect positive and negative of your sampler."


def dummy_conditioning(model: Any, chunks: int, generator: torch.Generator) -> Any:
    """A CONDITIONING for `model` (a ModelPatcher) of random embeddings, shape (1, tokens, width).

    chunks: length in chunks of 77 tokens (256 for Flux). Raises UserError for a model family whose conditioning has a
    shape that this module does not know.
    """
    tokens, width, pooled = _shape(model.model, chunks)
    more = {} if pooled is None else {"pooled_output": torch.randn((1, pooled), generator=generator)}
    return [[torch.randn((1, tokens, width), generator=generator), more]]


def _shape(base: Any, chunks: int) -> tuple[int, int, int | None]:
    """(tokens, width, width of the pooled embedding or None) for a model_base.BaseModel."""
    unet = base.diffusion_model
    if isinstance(base, comfy.model_base.Flux):
        parameters = unet.params
        return _T5_CHUNK * chunks, parameters.context_in_dim, parameters.vec_in_dim
    width = base.model_config.unet_config.get("context_dim")
    if isinstance(width, (list, tuple)):  # one entry for each level of the UNet
        width = next((each for each in width if each), None)
    if not isinstance(width, int) or not _takes_only_text(base):
        raise UserError(f"Resolute does not know the conditioning of a {type(base).__name__}. {_REMEDY}")
    return _CHUNK * chunks, width, _pooled_width(base)


def _takes_only_text(base: Any) -> bool:
    image_driven = (comfy.model_base.SVD_img2vid, comfy.model_base.SV3D_u, comfy.model_base.Stable_Zero123)
    return base.latent_format.latent_dimensions == 2 and not isinstance(base, image_driven)


def _pooled_width(base: Any) -> int | None:
    """The width of SDXL's pooled text embedding; None for other models.

    `adm_channels` also counts SDXL's size embeddings, 256 channels each: six for the base model, five for the refiner.
    """
    for kind, size_embeddings in ((comfy.model_base.SDXLRefiner, 5), (comfy.model_base.SDXL, 6)):
        if isinstance(base, kind):
            width: int = base.adm_channels - size_embeddings * 256
            return width
    return None
