"""Tell the backend that a decode will come, so that its regions compile while the diffusion model samples."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....compile_cache.backends.base import UpcomingDecode
from ....compile_cache.keys import Role
from ....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ....compile_cache.regions.slots import swapped
from ..blocks import vaes
from ..blocks.families import hooks_of
from ..blocks.pictures import attention_without_contents
from ..comfyui import dynamic_vram, version
from ..comfyui.module_attributes import ATTRIBUTES, CASTS
from ..forward.compiled_forward import CompiledForward


def announce_decode(vae: Any, forward: CompiledForward) -> None:
    """A decode of `vae` (comfy.sd.VAE) by `forward` will come."""
    patcher, device, dtype, channels = vae.patcher, torch.device(vae.device), vae.vae_dtype, vae.latent_channels
    if not forward.is_known_code:
        return
    reference, weights = weakref.ref(forward.module), forward.runner.weights
    forward_name = forward.inner.__name__
    attributes, pages = version.attributes_of_a_load(patcher), version.is_dynamic(patcher)

    def build_hooks(run: RegionRunner, bypass: Bypass) -> list[Hook]:
        module = _alive(reference)
        if (why := weights.why_foreign()) is not None:
            raise ValueError(why.detail)
        hooks = hooks_of(module, Role.VAE_DECODE, run, bypass)
        return [*hooks, *attention_without_contents(module, hooks)]

    def as_loaded() -> AbstractContextManager[None]:
        return swapped(_without_contents(_alive(reference), attributes, pages))

    def invoke(sampled: Sequence[int]) -> None:
        """sampled: the shape of the latent that will be decoded, perhaps twice by CFG."""
        module: Any = _alive(reference)
        method = getattr(type(module), forward_name)
        coder = vaes.coder_of(module, Role.VAE_DECODE)
        if coder is not None and coder.of_videos:
            is_picture = len(sampled) == 4 or (len(sampled) == 5 and sampled[2] == 1)  # else perhaps packed with sound
            shapes = coder.small(channels, is_picture)
        else:
            shapes = [(1, module.conv_in.in_channels, *sampled[2:])]
        for shape in shapes:
            method(module, torch.empty(shape, dtype=dtype, device="meta"))

    forward.compile_ahead(UpcomingDecode(device, build_hooks, as_loaded, invoke))


def _alive(reference: weakref.ref[torch.nn.Module]) -> torch.nn.Module:
    module = reference()
    if module is None:
        raise LookupError("the module was garbage collected")
    return module


def _without_contents(
    module: torch.nn.Module, loaded: dict[str, Any], pages: bool
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Slots and values for `swapped`: parameters without contents, in the dtypes in which ComfyUI will load them.

    loaded: attributes that a load sets on each module with weights, if those below it have none. pages: DynamicVRAM
    loads the model: it lets each module cast its weights that can, and casts those ahead that it gives pages. Raises
    ValueError where ComfyUI has loaded the weights in parts: then they are taken from elsewhere, or cast in each call.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        may_cast = ATTRIBUTES.may_cast(part)
        is_loaded = may_cast or any(weight is not None for weight in part._parameters.values())
        if is_loaded and all(name in part._parameters for name, _ in part.named_parameters()):
            yield from ((part.__dict__, name, value) for name, value in loaded.items() if name not in part.__dict__)
        if may_cast and ATTRIBUTES.casts_now(part) and not pages:
            raise ValueError(f"{type(part).__name__} takes its weights from elsewhere")
        if may_cast and pages:
            yield part.__dict__, CASTS, True
        for name, value in part._buffers.items():
            if type(value) is torch.Tensor:
                yield (
                    part._buffers,
                    name,
                    torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"),
                )
        as_in_file = may_cast and pages and dynamic_vram.is_put_as_it_is(part)
        for name, weight in part._parameters.items():
            if weight is None:
                continue
            if type(weight) is not torch.nn.Parameter:
                raise ValueError(f"{name} is a {type(weight).__name__}")
            dtype = (None if as_in_file else getattr(part, f"{name}_comfy_model_dtype", None)) or weight.dtype
            if id(weight) not in made:
                empty = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device="meta")
                made[id(weight)] = torch.nn.Parameter(empty, requires_grad=False)
            yield part._parameters, name, made[id(weight)]
