"""Compile a VAE: its decoder, its encoder, or both. Core still does tiling and the fallback when memory runs out."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from ....compile_cache.keys import Role
from ....compile_cache.texts import Text
from ..blocks import vaes
from ..comfyui import finished_pictures, latent_cells, switch
from ..process.compile_request import CompileRequest
from ..trust.describe import describe_code
from .backend_choice import explain_passthrough, request_for
from .patch_install import install_compiled_forward
from .replaced_forward import count_bypass


class Direction(NamedTuple):
    """One direction through a VAE: decode or encode.

    part: the attribute of a first_stage_model that runs it, "decoder". text: the name of the part, for people.
    """

    role: Role
    part: str
    text: Text

    def method_of(self, model: Any) -> str | None:
        """The dotted name of the method to compile in a first_stage_model; None if Resolute knows none."""
        if isinstance(getattr(model, f"taesd_{self.part}", None), torch.nn.Sequential):
            return f"taesd_{self.part}.forward"
        return vaes.method_of(model, self.role)

    def cell(self, vae: Any) -> int:
        """See `CompileRequest.cell`. An encoder takes pixels."""
        return latent_cells.of_vae(vae) if self.role is Role.VAE_DECODE else 1


DECODE = Direction(Role.VAE_DECODE, "decoder", Text("decoder"))
ENCODE = Direction(Role.VAE_ENCODE, "encoder", Text("encoder"))


def compile_vae(
    vae: Any, backend: str, node_id: str | None = None, directions: tuple[Direction, ...] = (DECODE, ENCODE)
) -> Any:
    """A copy of `vae` (comfy.sd.VAE) that runs these directions through the cache; the original is untouched.

    A direction that Resolute does not know runs eagerly, and the node says so. Raises UnknownBackendError or
    BackendUnavailableError.
    """
    if switch.is_off(node_id):
        return vae
    for direction in directions:
        name = direction.method_of(vae.first_stage_model)
        if name is None:
            _explain_unknown(vae.first_stage_model, direction, node_id)
            continue
        request = request_for(backend, vae.patcher, direction.role, node_id, cell=direction.cell(vae))
        vae = _with_compiled_method(vae, name, request)
        if direction is DECODE:
            finished_pictures.finish_on_gpu(vae)
    return vae


def compile_vae_decode(vae: Any, backend: str, node_id: str | None = None) -> Any:
    """`compile_vae` for decodes only."""
    return compile_vae(vae, backend, node_id, (DECODE,))


def _with_compiled_method(vae: Any, name: str, request: CompileRequest) -> Any:
    """A copy of `vae` whose method `name` ("decoder.forward") runs through the cache."""
    clone = copy.copy(vae)
    clone.patcher = vae.patcher.clone()
    clone.first_stage_model = clone.patcher.model
    install_compiled_forward(clone.patcher, name, request)
    return clone


# --- a direction that is not compiled ---------------------------------------------------------------------------


def _explain_unknown(model: Any, direction: Direction, node_id: str | None) -> None:
    wrapper = _wrapper(model, direction)
    reason = _why_not(model, direction) if wrapper is None else _why_not_wrapped(wrapper, direction)
    explain_passthrough(reason, node_id)
    if wrapper is not None:
        count_bypass(reason, is_logged=True)


def _why_not(model: Any, direction: Direction) -> str:
    if model is None:
        return Text("there is no VAE to compile: the checkpoint has none")
    kind = type(model).__name__
    return Text("{kind} has no {part} that Resolute knows, so it runs eagerly", kind=kind, part=direction.text)


def _wrapper(model: Any, direction: Direction) -> torch.nn.Module | None:
    """The module in which another pack wrapped a part that Resolute knows; None if there is no such wrapper."""
    for name in (f"taesd_{direction.part}", direction.part):
        found = getattr(model, name, None)
        if not isinstance(found, torch.nn.Module):
            continue
        inside = [module for module in found.modules() if module is not found]
        is_small = name != direction.part and any(type(module) is torch.nn.Sequential for module in inside)
        if is_small or any(vaes.coder_of(module, direction.role) is not None for module in inside):
            return found
    return None


def _why_not_wrapped(wrapper: torch.nn.Module, direction: Direction) -> str:
    return Text(
        "another node put {code} around the {part} of this VAE, so it runs as that node left it. "
        "Load the VAE anew without that node to compile it here.",
        code=describe_code(wrapper),
        part=direction.text,
    )
