"""One prediction of a model, and one decode of a VAE, through ComfyUI's own code: what a sampler and a node would do.

So every wrapper, patch, ControlNet and batching decision is the user's own, and the shapes are those that a run meets.
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
from ..deepcache.passes import RUN
from .texts import made_up

_SEED = 20240229
_STEPS = 20  # of the schedule from which noise levels are taken; DeepCache plans its passes by it


def predict(model: Any, item: Item, cfg: float, texts: tuple[Any, Any] | None, control_net: Any, vae: Any) -> None:
    """Call `model` (a ModelPatcher) once for each set of conditions that a run at `item` would meet.

    texts: positive and negative CONDITIONING, used as they are; None makes them up by `item.chunks`. control_net: put
    onto both texts with a hint of noise. vae: for a ControlNet that encodes its hint.
    """
    generator = torch.Generator().manual_seed(_SEED)
    positive, negative = texts or [made_up(model, item.chunks or 1, generator) for _ in range(2)]
    if control_net is not None:
        picture = torch.rand((1, item.size.height, item.size.width, 3), generator=generator)
        hint = picture.movedim(-1, 1)  # channels last, as pictures of ComfyUI are
        positive, negative = _with_control((positive, negative), control_net, hint, vae)
    latent_format = model.get_model_object("latent_format")
    latent = torch.zeros(_latent_shape(item, latent_format.latent_channels, _ratio(latent_format)))
    latent = comfy.sample.fix_empty_latent_channels(model, latent)  # with a dimension for frames, where it has one
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


def decode(vae: Any, item: Item, tile_size: int, overlap: int) -> None:
    """Decode noise. tile_size, overlap: in pixels, as for VAE Decode (Tiled); tile_size 0 decodes the whole picture."""
    if vae.latent_dim != 2:
        raise UserError("a VAE of videos or sound has no sizes that Warm Up knows: it makes latents of pictures")
    ratio = vae.spacial_compression_decode()
    shape = _latent_shape(item, vae.latent_channels, ratio)
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
    if tile_size == 0:
        vae.decode(latent)
        return
    overlap = min(overlap, tile_size // 4)  # as core's node does
    vae.decode_tiled(latent, tile_x=tile_size // ratio, tile_y=tile_size // ratio, overlap=overlap // ratio)


def sample_once(
    model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any] | None = None, **_: Any
) -> torch.Tensor:
    """A sampler, as core's `KSAMPLER` calls one: it asks for as few predictions as meet every set of conditions."""
    arguments = extra_args or {}
    run = arguments.get("model_options", {}).get("transformer_options", {}).get(RUN)
    levels = sigmas[:-1].tolist()
    for stage in _stages(levels, _boundaries(getattr(model.inner_model, "conds", {}))):
        before = {} if run is None else dict(run.passes)
        for step in stage:
            model(x, sigmas[step] * x.new_ones([x.shape[0]]), **arguments)
            if run is None or all(run.passes[kind] > before.get(kind, 0) for kind in ("full", "fast")):
                break
    return x


def _stages(levels: Sequence[float], boundaries: Iterable[float]) -> Iterator[list[int]]:
    """The steps, grouped by the noise levels at which a condition or a ControlNet comes or goes."""
    limits = sorted(set(boundaries))
    for _, steps in itertools.groupby(range(len(levels)), lambda step: sum(levels[step] > limit for limit in limits)):
        yield list(steps)


def _boundaries(conds: Any) -> Iterator[float]:
    for cond in itertools.chain.from_iterable(conds.values()):
        for name in ("timestep_start", "timestep_end"):
            if cond.get(name) is not None:
                yield float(cond[name])
        control = cond.get("control")
        while control is not None:
            for level in getattr(control, "timestep_range", None) or ():
                yield float(level)
            control = getattr(control, "previous_controlnet", None)


def _with_control(texts: Sequence[Any], control_net: Any, hint: torch.Tensor, vae: Any) -> list[Any]:
    """As core's node does: texts with the same ControlNet before this one share it, and are sampled in one batch."""
    controls: dict[Any, Any] = {}

    def control_after(previous: Any) -> Any:
        if previous not in controls:
            controls[previous] = control_net.copy().set_cond_hint(hint, 1.0, (0.0, 1.0), vae=vae)
            controls[previous].set_previous_controlnet(previous)
        return controls[previous]

    return [
        [
            [embedding, {**more, "control": control_after(more.get("control")), "control_apply_to_uncond": False}]
            for embedding, more in text
        ]
        for text in texts
    ]


def _latent_shape(item: Item, channels: int, ratio: int) -> tuple[int, int, int, int]:
    return (item.batch, channels, item.size.height // ratio, item.size.width // ratio)


def _ratio(latent_format: Any) -> int:
    return int(getattr(latent_format, "spacial_downscale_ratio", 8))  # 0.8 has no other
