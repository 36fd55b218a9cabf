"""Run a model or a VAE once for a warm-up, through ComfyUI's own sampling and decoding code.

Because ComfyUI's code makes the calls, the user's wrappers, patches, ControlNets and cond batching all apply, and the
shapes are exactly those of a real run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import comfy.sample
import comfy.samplers
import torch

from ....compile_cache.errors import UserError
from ....compile_cache.warm_up_plan import Item
from ..comfyui import latent_cells
from ..comfyui.transformer_options import STEP_CACHE_RUN
from .dummy_conditioning import dummy_conditioning

_SEED = 20240229
_STEPS = 20  # length of the noise schedule; long enough that a step cache (DeepCache needs more than 8 steps) is active


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
        hint = image.movedim(-1, 1)  # a view of a channels-last image, the memory layout that core's nodes give
        positive, negative = _with_control((positive, negative), control_net, hint, vae)
    latent_format = model.get_model_object("latent_format")
    latent = torch.zeros(_latent_shape(item, latent_format.latent_channels, latent_cells.of_format(latent_format)))
    latent = comfy.sample.fix_empty_latent_channels(model, latent)  # adds a frame dimension for video models
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", _STEPS)
    comfy.sample.sample_custom(
        model,
        torch.randn(latent.shape, generator=generator),
        cfg,
        comfy.samplers.KSAMPLER(sample_once),
        sigmas,
        positive,
        negative,
        latent,
        disable_pbar=True,
        seed=_SEED,
    )


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
    scale_factor = vae.spacial_compression_decode()
    shape = _latent_shape(item, vae.latent_channels, scale_factor)
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
    if tile_size == 0:
        vae.decode(latent)
        return
    overlap = min(overlap, tile_size // 4)  # core's VAEDecodeTiled limits it like this
    tile = tile_size // scale_factor
    vae.decode_tiled(latent, tile_x=tile, tile_y=tile, overlap=overlap // scale_factor)


def _require_images(vae: Any) -> None:
    if vae.latent_dim != 2:
        raise UserError("Warm Up can only warm up VAEs of images, not of videos or sound. Disconnect this VAE.")


def sample_once(
    model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any] | None = None, **_: Any
) -> torch.Tensor:
    """A sampler function for core's `KSAMPLER`. It makes as few predictions as are needed to warm up every shape.

    That is one for each stage (see `_stages`), and with a step cache as many more as it takes to run each kind of pass.
    Returns `x` unchanged.
    """
    arguments = extra_args or {}
    run = arguments.get("model_options", {}).get("transformer_options", {}).get(STEP_CACHE_RUN)
    levels = sigmas[:-1].tolist()
    for stage in _stages(levels, _boundaries(getattr(model.inner_model, "conds", {}))):
        before = {} if run is None else dict(run.passes)
        for step in stage:
            model(x, sigmas[step] * x.new_ones([x.shape[0]]), **arguments)
            if run is None or all(run.passes[kind] > count for kind, count in before.items()):
                break
    return x


def _stages(levels: Sequence[float], boundaries: Iterable[float]) -> Iterator[list[int]]:
    """Groups of steps within which no cond and no ControlNet starts or ends. boundaries: the sigmas where one does."""
    limits = sorted({torch.tensor(limit).item() for limit in boundaries})  # in fp32, as core compares them

    def place(step: int) -> tuple[int, int]:
        # A step right at a limit is a group of its own: a cond that starts there is on, and so is one that ends there.
        return sum(levels[step] > limit for limit in limits), sum(levels[step] >= limit for limit in limits)

    for _, steps in itertools.groupby(range(len(levels)), place):
        yield list(steps)


def _boundaries(conds: Any) -> Iterator[float]:
    """The noise levels (sigmas) at which a cond or one of its ControlNets starts or ends."""
    for cond in itertools.chain.from_iterable(conds.values()):
        for name in ("timestep_start", "timestep_end"):
            if cond.get(name) is not None:
                yield float(cond[name])
        control = cond.get("control")
        while control is not None:
            for level in getattr(control, "timestep_range", None) or ():
                yield float(level)
            control = getattr(control, "previous_controlnet", None)


def _with_control(conditionings: Sequence[Any], control_net: Any, hint: torch.Tensor, vae: Any) -> list[Any]:
    """Apply a ControlNet to each CONDITIONING, like core's ControlNetApplyAdvanced.

    Entries with the same previous ControlNet must share one copy, because core only batches conds that share it.
    """
    controls: dict[Any, Any] = {}

    def control_after(previous: Any) -> Any:
        if previous not in controls:
            controls[previous] = control_net.copy().set_cond_hint(hint, 1.0, (0.0, 1.0), vae=vae)
            controls[previous].set_previous_controlnet(previous)
        return controls[previous]

    return [
        [
            [embedding, {**more, "control": control_after(more.get("control")), "control_apply_to_uncond": False}]
            for embedding, more in conditioning
        ]
        for conditioning in conditionings
    ]


def _latent_shape(item: Item, channels: int, scale_factor: int) -> tuple[int, int, int, int]:
    return (item.batch, channels, item.size.height // scale_factor, item.size.width // scale_factor)
