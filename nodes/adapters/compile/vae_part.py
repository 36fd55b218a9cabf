"""Compile the decoder or the encoder of a VAE, or say why it stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ....compile_cache.texts import Text
from ..foreign.describe import describe_code
from ..forward.compiled_forward import CompiledForward
from ..forward.patch_install import install_compiled_forward
from ..forward.replaced_forward import count_bypass
from ..process.compile_request import CompileRequest
from ..weights.static_clone import static_clone
from .backend_choice import explain_passthrough

_NAMES = {"decoder": Text("decoder"), "encoder": Text("encoder")}


def with_compiled_method(vae: Any, name: str, request: CompileRequest) -> tuple[Any, CompiledForward]:
    """A copy of `vae` whose method `name` ("decoder.forward") runs through the cache, and that forward."""
    static = request.capabilities.needs_static_weights
    patcher = static_clone(vae.patcher, vae.vae_dtype) if static else vae.patcher.clone()
    forward = install_compiled_forward(patcher, name, request)
    clone = copy.copy(vae)
    clone.patcher = patcher
    clone.first_stage_model = patcher.model
    return clone, forward


def taesd_method(model: Any, part: str) -> str | None:
    """The method of TAESD's "decoder" or "encoder"; None for another model."""
    name = f"taesd_{part}"
    return f"{name}.forward" if isinstance(getattr(model, name, None), torch.nn.Sequential) else None


def explain_unknown(model: Any, part: str, is_known: Callable[[Any], bool], node_id: str | None) -> None:
    """Say why the "decoder" or "encoder" of a VAE's model stays as it is. is_known: a module is one to compile."""
    wrapper = _wrapper(model, part, is_known)
    reason = _why_not(model, part) if wrapper is None else _why_not_wrapped(wrapper, part)
    explain_passthrough(reason, node_id)
    if wrapper is not None:
        count_bypass(reason, is_logged=True)


def _why_not(model: Any, part: str) -> str:
    if model is None:
        return Text("there is no VAE to compile: the checkpoint has none")
    kind = type(model).__name__
    return Text("{kind} has no {part} that Resolute knows, so it runs as it is", kind=kind, part=_NAMES[part])


def _wrapper(model: Any, part: str, is_known: Callable[[Any], bool]) -> torch.nn.Module | None:
    """The module that another pack put around a part that Resolute knows, on the model itself."""
    for name in (f"taesd_{part}", part):
        found = getattr(model, name, None)
        if not isinstance(found, torch.nn.Module):
            continue
        inside = [module for module in found.modules() if module is not found]
        is_small = name != part and any(type(module) is torch.nn.Sequential for module in inside)
        if is_small or any(map(is_known, inside)):
            return found
    return None


def _why_not_wrapped(wrapper: torch.nn.Module, part: str) -> str:
    return Text(
        "another node put {code} around the {part} of this VAE, so it runs as that node left it. "
        "Load the VAE anew without that node to compile it here.",
        code=describe_code(wrapper),
        part=_NAMES[part],
    )
