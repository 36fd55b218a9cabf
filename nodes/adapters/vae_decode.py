"""Compile the decoder of a VAE. Encoding, tiling and the fall-back when memory runs out stay core's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ...compile_cache.keys import Role
from ...compile_cache.regions import Hook, RegionRunner
from .blocks import vae as vae_blocks
from .blocks.common import Bypass
from .delegate import static_clone
from .module_runner import ModuleRunner, announce_backend
from .signature import Description

# Image decoders by the attribute that holds them: AutoencoderKL, and TAESD.
_DECODERS = ("decoder", "taesd_decoder")


def compile_vae_decode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose decoder runs through the cache; the original is untouched.

    Raises UnknownBackendError or BackendUnavailableError, and ValueError for a VAE without a decoder that we know.
    """
    announce_backend(backend, torch.device(vae.device).type, node_id)
    patcher = static_clone(vae.patcher, vae.vae_dtype)
    model = patcher.model
    name = next((name for name in _DECODERS if isinstance(getattr(model, name, None), torch.nn.Module)), None)
    if name is None:
        raise ValueError(
            f"This VAE ({type(model).__name__}) has no image decoder that Resolute can compile. "
            "Connect it to VAE Decode directly."
        )
    hook = f"{name}.forward"
    inner = patcher.get_model_object(hook)
    if isinstance(inner, CompiledDecoder):
        inner = inner.inner
    patcher.add_object_patch(hook, CompiledDecoder(getattr(model, name), inner, backend, node_id))
    clone = copy.copy(vae)
    clone.patcher = patcher
    clone.first_stage_model = model
    return clone


class CompiledDecoder:
    """Stands in for the decoder's `forward(z)`; z: (batch, latent channels, height, width)."""

    def __init__(self, module: torch.nn.Module, inner: Any, backend: str, node_id: str | None) -> None:
        self.inner = inner
        self._module = module
        self._runner = ModuleRunner(module, backend, Role.VAE_DECODE, self._hooks, node_id)

    def _hooks(self, run: RegionRunner, bypass: Bypass) -> Sequence[Hook]:
        return vae_blocks.hooks(self._module, run, bypass)

    @torch.compiler.disable
    def __call__(self, z: Any, **kwargs: Any) -> Any:
        description = Description()
        latent = description.take("latent", z)
        keywords = {name: description.take(name, value) for name, value in kwargs.items()}

        def invoke(tensors: Sequence[torch.Tensor]) -> Any:
            return self.inner(latent(tensors), **{name: build(tensors) for name, build in keywords.items()})

        return self._runner.run(description, invoke, thorough=True)
