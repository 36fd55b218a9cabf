"""Run a model or a VAE once for a warm-up, through ComfyUI's own sampling and decoding code.

Because ComfyUI's code makes the calls, the user's wrappers, patches, ControlNets and cond batching all apply, and the
shapes are exactly those of a real run.
"""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.sample
import torch

from ....compile_cache.errors import UserError
from ....compile_cache.warm_up_plan import Item
from ..comfyui import latent_cells
from .one_step import with_few_steps

_SEED = 20240229
_STEPS = 20  # length of the noise schedule; long enough that a step cache (DeepCache needs more than 8 steps) is active
_CHUNK = 77  # tokens in one chunk of CLIP's
_T5_CHUNK = 256  # core pads Flux's T5 embeddings to at least this many tokens
_REMEDY = "Connect positive and negative of your sampler."


def predict(
    model: Any, item: Item, cfg: float, conditioning: tuple[Any, Any] | None, control_net: Any, vae: Any
) -> None:
    """Call `model` (a ModelPatcher) once for each combination of conds that a real run at `item` would use.

    conditioning: positive and negative CONDITIONING, used unchanged; None uses dummies of `item.chunks` chunks.
    control_net: applied to both, with noise as its hint image. vae: for a ControlNet that encodes its hint.
    """
    generator = torch.Generator().manual_seed(_SEED)
    positive, negative = conditioning or [dummy_conditioning(model, item.chunks or 1, generator) for _ in range(2)]
    if control_net is not None:
        image = torch.rand((1, item.size.height, item.size.width, 3), generator=generator)
        apply = _core_node("ControlNetApplyAdvanced").apply_controlnet
        positive, negative = apply(positive, negative, control_net, image, 1.0, 0.0, 1.0, vae)
    latent_format = model.get_model_object("latent_format")
    latent = torch.zeros(_latent_shape(item, latent_format.latent_channels, latent_cells.of_format(latent_format)))
    latent = comfy.sample.fix_empty_latent_channels(model, latent)  # adds a frame dimension for video models
    noise = torch.randn(latent.shape, generator=generator)
    few, sampler = with_few_steps(model), "euler"  # replaced by `few`
    given = (cfg, sampler, "simple", positive, negative, latent)
    comfy.sample.sample(few, noise, _STEPS, *given, disable_pbar=True, seed=_SEED)


def encode(vae: Any, item: Item) -> None:
    """Encode images of noise with `vae` at `item`. Raises UserError for a VAE of videos or sound."""
    _require_images(vae)
    shape = (item.batch, item.size.height, item.size.width, 3)
    vae.encode(torch.rand(shape, generator=torch.Generator().manual_seed(_SEED)))


def decode(vae: Any, item: Item, tile_size: int, overlap: int) -> None:
    """Decode a latent of noise with `vae` at `item`. Raises UserError for a VAE of videos or sound.

    tile_size, overlap: in pixels, as in VAE Decode (Tiled); tile_size 0 decodes the whole image.
    """
    _require_images(vae)
    shape = _latent_shape(item, vae.latent_channels, vae.spacial_compression_decode())
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
    if tile_size:
        _core_node("VAEDecodeTiled").decode(vae, {"samples": latent}, tile_size, overlap)
    else:
        vae.decode(latent)


def _core_node(name: str) -> Any:
    """An instance of one of core's nodes, to call here. Only a running server has them."""
    import nodes

    return nodes.NODE_CLASS_MAPPINGS[name]()


def _require_images(vae: Any) -> None:
    if vae.latent_dim != 2:
        raise UserError("Warm Up can only warm up VAEs of images, not of videos or sound. Disconnect this VAE.")


def _latent_shape(item: Item, channels: int, scale_factor: int) -> tuple[int, int, int, int]:
    return (item.batch, channels, item.size.height // scale_factor, item.size.width // scale_factor)


def dummy_conditioning(model: Any, chunks: int, generator: torch.Generator) -> Any:
    """A CONDITIONING for `model` (a ModelPatcher) of random embeddings. Only their shape (1, tokens, width) matters.

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
