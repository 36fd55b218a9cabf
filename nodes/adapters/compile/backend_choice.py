"""What a compile node says about its backend, or about a model that it does not compile."""

from __future__ import annotations

import logging

import torch

from ....compile_cache.backends import registry
from ....compile_cache.backends.base import Capabilities
from ..comfyui.progress import NodeProgress
from ..process import runtime

logger = logging.getLogger(__name__)


def prepare_backend(name: str, device: torch.device, node_id: str | None) -> Capabilities:
    """Check a backend for a device, let it start what takes a while, and show on the node which one runs, and why.

    Returns what the backend can do there. Raises UnknownBackendError or BackendUnavailableError.
    """
    backend, capabilities, why = registry.resolve(name, device.type)
    backend.prewarm(device, runtime.cache().config)
    logger.info("Resolute: backend %s", why)
    NodeProgress(node_id).show(f"backend: {why}")
    return capabilities


def explain_passthrough(reason: str, node_id: str | None) -> None:
    """Say on the node and in the log why its input is passed on as it is."""
    logger.info("Resolute: %s", reason)
    NodeProgress(node_id).show(reason)
