"""Build the request of a compile node, and show on the node the chosen backend or why it compiles nothing."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ....compile_cache.errors import BackendUnavailableError
from ....compile_cache.keys import Role
from ....compile_cache.texts import Text
from ..comfyui import version
from ..comfyui.messages import show_on_node
from ..process import runtime
from ..process.compile_request import CompileRequest

logger = logging.getLogger(__name__)


def request_for(chosen: str, patcher: Any, role: Role, node_id: str | None, **settings: Any) -> CompileRequest:
    """Choose the backend for the device of `patcher`, prewarm it, and show on the node which one runs, and why.

    settings: further fields of the request. Raises UnknownBackendError, or BackendUnavailableError, also if the backend
    needs weights at fixed places and DynamicVRAM moves them.
    """
    device: torch.device = patcher.load_device
    label = type(getattr(patcher.model, "model_config", patcher.model)).__name__  # "SDXL"
    file = version.file_of(patcher)
    request = CompileRequest.resolved(chosen, device.type, role, node_id=node_id, label=label, file=file, **settings)
    if request.capabilities.needs_static_weights and version.is_dynamic(patcher):
        reason = "it needs weights that stay in place, and ComfyUI's DynamicVRAM moves them"
        raise BackendUnavailableError(chosen, reason, "Start ComfyUI with --disable-dynamic-vram, or choose 'auto'.")
    request.backend.prewarm(device, runtime.cache().config, runtime.cache().stats.host)
    logger.info("Resolute: backend %s", request.why)
    show_on_node(Text("backend: {why}", why=request.why), node_id)
    return request


def explain_passthrough(reason: str, node_id: str | None) -> None:
    """Say on the node and in the log why the node passes its input through without compiling it."""
    logger.info("Resolute: %s", reason)
    show_on_node(reason, node_id)
