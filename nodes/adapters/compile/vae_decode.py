"""Compile the decoder of a VAE. Encoding, tiling and the fall-back when memory runs out stay core's."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ....compile_cache.keys import Role
from ....compile_cache.texts import Text
from ..blocks import decoder
from ..comfyui import latent_cells, switch
from ..foreign.describe import describe_code
from ..forward.patch_install import install_compiled_forward
from ..forward.replaced_forward import count_bypass
from ..weights.static_clone import static_clone
from .backend_choice import explain_passthrough, request_for
from .upcoming_decode import announce_decode


def compile_vae_decode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose decoder runs through the cache; the original is untouched.

    A VAE whose decoder Resolute does not know comes back as it is, and the node says so. Raises UnknownBackendError or
    BackendUnavailableError.
    """
    if switch.is_off(node_id):
        return vae
    name = _decoder_of(vae.first_stage_model)
    if name is None:
        wrapper = _wrapped_decoder(vae.first_stage_model)
        reason = _why_not(vae.first_stage_model) if wrapper is None else _why_not_wrapped(wrapper)
        explain_passthrough(reason, node_id)
        if wrapper is not None:
            count_bypass(reason, is_logged=True)
        return vae
    request = request_for(backend, vae.patcher, Role.VAE_DECODE, node_id, cell=latent_cells.of_vae(vae))
    static = request.capabilities.needs_static_weights
    patcher = static_clone(vae.patcher, vae.vae_dtype) if static else vae.patcher.clone()
    forward = install_compiled_forward(patcher, f"{name}.forward", request)
    announce_decode(patcher, forward, torch.device(vae.device), vae.vae_dtype)
    clone = copy.copy(vae)
    clone.patcher = patcher
    clone.first_stage_model = patcher.model
    return clone


def _decoder_of(model: Any) -> str | None:
    """The attribute that holds an image decoder. Those of videos carry frames from call to call in lists and buffers
    of the caller's, which a graph would not see.
    """
    if isinstance(getattr(model, "taesd_decoder", None), torch.nn.Sequential):
        return "taesd_decoder"
    return "decoder" if decoder.is_decoder(getattr(model, "decoder", None)) else None


def _why_not(model: Any) -> str:
    if model is None:
        return Text("there is no VAE to compile: the checkpoint has none")
    kind = type(model).__name__
    return Text("{kind} has no image decoder that Resolute knows, so it runs as it is", kind=kind)


def _wrapped_decoder(model: Any) -> torch.nn.Module | None:
    """The module that another pack put around a decoder that Resolute knows, on the model itself."""
    for name in ("taesd_decoder", "decoder"):
        found = getattr(model, name, None)
        if not isinstance(found, torch.nn.Module):
            continue
        inside = [module for module in found.modules() if module is not found]
        if any(decoder.is_decoder(module) for module in inside) or (
            name == "taesd_decoder" and any(type(module) is torch.nn.Sequential for module in inside)
        ):
            return found
    return None


def _why_not_wrapped(wrapper: torch.nn.Module) -> str:
    return Text(
        "another node put {code} around the decoder of this VAE, so it runs as that node left it. "
        "Load the VAE anew without that node to compile it here.",
        code=describe_code(wrapper),
    )
