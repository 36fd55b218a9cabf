"""Compile the encoder of a VAE, and a VAE both ways. Tiling and the fall-back when memory runs out stay core's."""

from __future__ import annotations

from typing import Any

from ....compile_cache.keys import Role
from ..blocks import encoder
from ..blocks.videos import encoders
from ..comfyui import switch
from .backend_choice import request_for
from .vae_decode import compile_vae_decode
from .vae_part import explain_unknown, taesd_method, with_compiled_method

_PIXEL = 1  # pixels to a side of what an encoder takes, see `CompileRequest.cell`


def compile_vae(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) that decodes and encodes through the cache; the original is untouched.

    A way that Resolute does not know stays as it is, and the node says so. Raises as `compile_vae_decode` does.
    """
    return compile_vae_encode(compile_vae_decode(vae, backend, node_id), backend, node_id)


def compile_vae_encode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose encoder runs through the cache; see `compile_vae_decode`."""
    if switch.is_off(node_id):
        return vae
    name = _method_of(vae.first_stage_model)
    if name is None:
        explain_unknown(vae.first_stage_model, "encoder", encoder.is_encoder, node_id)
        return vae
    request = request_for(backend, vae.patcher, Role.VAE_ENCODE, node_id, cell=_PIXEL)
    return with_compiled_method(vae, name, request)[0]


def _method_of(model: Any) -> str | None:
    """The method that encodes, of the model or of a module in it; see the decoder's."""
    if (name := taesd_method(model, "encoder") or encoders.method_of(model)) is not None:
        return name
    return "encoder.forward" if encoder.is_encoder(getattr(model, "encoder", None)) else None
