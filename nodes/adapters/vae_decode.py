"""Compile the decoder of a VAE. Encoding, tiling and the fall-back when memory runs out stay core's."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...compile_cache.keys import Role
from .blocks import vae as vae_blocks
from .delegate import static_clone
from .hooking import hook_forward
from .module_runner import prepare_backend

# Image decoders by the attribute that holds them: AutoencoderKL, and TAESD.
_DECODERS = ("decoder", "taesd_decoder")
_FAMILIES = (vae_blocks.hooks,)


def compile_vae_decode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose decoder runs through the cache; the original is untouched.

    Raises UnknownBackendError or BackendUnavailableError, and ValueError for a VAE without a decoder that we know.
    """
    prepare_backend(backend, torch.device(vae.device), node_id)
    patcher = static_clone(vae.patcher, vae.vae_dtype)
    model = patcher.model
    name = next((name for name in _DECODERS if isinstance(getattr(model, name, None), torch.nn.Module)), None)
    if name is None:
        raise ValueError(
            f"This VAE ({type(model).__name__}) has no image decoder that Resolute can compile. "
            "Connect it to VAE Decode directly."
        )
    hook_forward(patcher, f"{name}.forward", backend, Role.VAE_DECODE, _FAMILIES, node_id)
    clone = copy.copy(vae)
    clone.patcher = patcher
    clone.first_stage_model = model
    return clone
