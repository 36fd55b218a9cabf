"""Give memory back."""

from __future__ import annotations

import logging

import comfy.model_management

from ...compile_cache.backends.graph_memory import release_graph_memory
from . import service

logger = logging.getLogger(__name__)


def free_graphs() -> int:
    """Free the captures that no run uses, and the allocator's caches. Returns the bytes of the captures."""
    freed = service.cache().trim()
    release_graph_memory()
    comfy.model_management.soft_empty_cache()
    logger.info("Resolute: freed %d MiB of captured graphs", freed >> 20)
    return freed
