"""Compile the decoder of a VAE. Encoding, tiling and the fall-back when memory runs out stay core's."""

from __future__ import annotations

from typing import Any

import torch

from ....compile_cache.keys import Role
from ..blocks import decoder
from ..comfyui import latent_cells, switch
from .backend_choice import request_for
from .upcoming_decode import announce_decode
from .vae_part import explain_unknown, taesd_part, with_compiled_part


def compile_vae_decode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose decoder runs through the cache; the original is untouched.

    A VAE whose decoder Resolute does not know comes back as it is, and the node says so. Raises UnknownBackendError or
    BackendUnavailableError.
    """
    if switch.is_off(node_id):
        return vae
    name = _decoder_of(vae.first_stage_model)
    if name is None:
        explain_unknown(vae.first_stage_model, "decoder", decoder.is_decoder, node_id)
        return vae
    request = request_for(backend, vae.patcher, Role.VAE_DECODE, node_id, cell=latent_cells.of_vae(vae))
    clone, forward = with_compiled_part(vae, name, request)
    announce_decode(clone.patcher, forward, torch.device(vae.device), vae.vae_dtype)
    return clone


def _decoder_of(model: Any) -> str | None:
    """The attribute that holds an image decoder. Those of videos carry frames from call to call in lists and buffers
    of the caller's, which a graph would not see.
    """
    return taesd_part(model, "decoder") or ("decoder" if decoder.is_decoder(getattr(model, "decoder", None)) else None)
