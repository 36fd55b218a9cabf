"""Compile the network of a CONTROL_NET. Strength, percent windows and chains stay core's."""

from __future__ import annotations

from typing import Any

import comfy.controlnet

from ....compile_cache.code_identity.attributes import replaced_methods
from ....compile_cache.keys import Role
from ....compile_cache.texts import Text
from ..comfyui import switch
from .backend_choice import explain_passthrough, request_for
from .patch_install import install_compiled_forward


def compile_controlnet(control_net: Any, backend: str, node_id: str | None = None) -> Any:
    """A copy of `control_net` (comfy.controlnet.ControlBase) whose network runs through the cache.

    The original is untouched. If it has no network that Resolute can compile, the copy runs eagerly, and the node says
    why. Raises UnknownBackendError or BackendUnavailableError.
    """
    if switch.is_off(node_id):
        return control_net
    copy = control_net.copy()
    reason = _why_not(copy)
    if reason is not None:
        explain_passthrough(reason, node_id)
        return copy
    request = request_for(backend, copy.control_model_wrapped, Role.CONTROLNET, node_id)
    patcher = copy.control_model_wrapped.clone()
    if not replaced_methods(patcher.model):
        # In a chain with the original, core loads both: with a shared backup, the later load would undo the patches.
        patcher.object_patches_backup = {}
    install_compiled_forward(patcher, "forward", request)
    copy.control_model_wrapped = patcher
    copy.control_model = patcher.model
    return copy


def _why_not(control_net: Any) -> str | None:
    if isinstance(control_net, comfy.controlnet.T2IAdapter):
        return Text("a T2I adapter runs once per picture, not once per step: there is nothing to compile")
    if isinstance(control_net, comfy.controlnet.ControlLora):
        return Text("a ControlLora is built anew from the model in every run, so it runs eagerly")
    if getattr(control_net, "control_model_wrapped", None) is None:
        kind = type(control_net).__name__
        return Text("{kind} has no network that Resolute knows, so it runs eagerly", kind=kind)
    return None
