"""Give memory back: on request, and before a model is loaded that would not fit beside the captures."""

from __future__ import annotations

import logging
from typing import Any

import comfy.model_management
import comfy.sampler_helpers
from comfy.patcher_extension import WrappersMP

from ....compile_cache.backends.cuda_graphs.memory import release_graph_memory
from ..process import runtime

logger = logging.getLogger(__name__)

_KEY = "resolute-memory"


def free_graphs() -> int:
    """Free the captures that no run uses, and the allocator's caches. Returns the bytes of the captures."""
    freed = runtime.cache().trim()
    release_graph_memory()
    comfy.model_management.soft_empty_cache()
    logger.info("Resolute: freed %d MiB of captured graphs", freed >> 20)
    return freed


def make_room_before_sampling(patcher: Any) -> None:
    """Let captures go before `patcher` (a clone of ours) is loaded, where its weights would have to be streamed."""
    patcher.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, _KEY)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, _KEY, _make_room)


def _make_room(executor: Any, patcher: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    if runtime.cache().bytes:
        missing = _missing(patcher, noise_shape, conds)
        if missing > 0 and (freed := runtime.cache().trim(missing)):
            release_graph_memory()
            comfy.model_management.soft_empty_cache()
            logger.info("Resolute: freed %d MiB of captured graphs to make room for the model", freed >> 20)
    return executor(patcher, noise_shape, conds, *args, **kwargs)


def _missing(patcher: Any, noise_shape: Any, conds: Any) -> int:
    """Bytes by which the device is short for the rest of the weights and for the run, as core reckons them."""
    management = comfy.model_management
    run, _ = comfy.sampler_helpers.estimate_memory(patcher, noise_shape, conds)
    run = max(management.minimum_inference_memory(), run + management.extra_reserved_memory())
    weights = patcher.model_size() - patcher.loaded_size()
    return int(1.1 * weights + run - management.get_free_memory(patcher.load_device))
