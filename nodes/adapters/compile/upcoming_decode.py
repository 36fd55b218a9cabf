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
from ..blocks.decoder import attention_without_contents
from ..blocks.families import hooks_of
from ..comfyui import dynamic_vram, version
from ..comfyui.module_attributes import ATTRIBUTES, CASTS
from ..forward.compiled_forward import CompiledForward


def announce_decode(patcher: Any, forward: CompiledForward, device: torch.device, dtype: torch.dtype) -> None:
    """A decode by `forward` will come, on `device` in `dtype`. patcher: that loads it."""
    if not forward.is_known_code:
        return
    reference, weights = weakref.ref(forward.module), forward.runner.weights
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
        """sampled: (batch, channels, height, width), the latent that will be decoded, perhaps twice by CFG."""
        module: Any = _alive(reference)
        _, _, height, width = sampled
        latent = torch.empty((1, module.conv_in.in_channels, height, width), dtype=dtype, device="meta")
        type(module).forward(module, latent)

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

    loaded: attributes that a load sets on each module with weights that ComfyUI may cast. pages: DynamicVRAM loads the
    model: it lets each such module cast its weights, and casts those ahead that it gives pages. Raises ValueError where
    ComfyUI has loaded the weights in parts: then they are taken from elsewhere, or cast in each call.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        may_cast = ATTRIBUTES.may_cast(part)
        if may_cast:
            yield from ((part.__dict__, name, value) for name, value in loaded.items() if name not in part.__dict__)
        if (may_cast and ATTRIBUTES.casts_now(part) and not pages) or part._buffers:
            raise ValueError(f"{type(part).__name__} takes its weights from elsewhere")
        if may_cast and pages:
            yield part.__dict__, CASTS, True
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
