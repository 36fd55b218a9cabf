"""Compile the decoder of a VAE. Encoding, tiling and the fall-back when memory runs out stay core's."""

from __future__ import annotations

from typing import Any

import torch

from ....compile_cache.keys import Role
from ..blocks import decoder
from ..blocks.videos import known as videos
from ..comfyui import latent_cells, switch
from .backend_choice import request_for
from .upcoming_decode import announce_decode
from .vae_part import explain_unknown, taesd_method, with_compiled_method


def compile_vae_decode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose decoder runs through the cache; the original is untouched.

    A VAE whose decoder Resolute does not know comes back as it is, and the node says so. Raises UnknownBackendError or
    BackendUnavailableError.
    """
    if switch.is_off(node_id):
        return vae
    name = _method_of(vae.first_stage_model)
    if name is None:
        explain_unknown(vae.first_stage_model, "decoder", decoder.is_decoder, node_id)
        return vae
    request = request_for(backend, vae.patcher, Role.VAE_DECODE, node_id, cell=latent_cells.of_vae(vae))
    clone, forward = with_compiled_method(vae, name, request)
    announce_decode(clone.patcher, forward, torch.device(vae.device), vae.vae_dtype)
    return clone


def _method_of(model: Any) -> str | None:
    """The method that decodes, of the model or of a module in it. That of a video decoder is one around everything that
    carries frames from call to call.
    """
    if (name := taesd_method(model, "decoder") or videos.method_of(model)) is not None:
        return name
    return "decoder.forward" if decoder.is_decoder(getattr(model, "decoder", None)) else None
