"""Capture the shapes of earlier processes again: at the first call that differs from them in sizes only."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable
from dataclasses import replace

import comfy.model_management
import torch

from ....compile_cache.backends.base import Call, Program
from ....compile_cache.keys import GraphKey, TensorSpec
from ....compile_cache.regions.dummy_inputs import dummy_input
from ..process import runtime
from .shape_status import locate

logger = logging.getLogger(__name__)

_MAX_SECONDS = 5.0  # a user is waiting for a picture
_MAX_CAPTURES = 16


def recapture(program: Program, call: Call, done: set[Hashable]) -> None:
    """Capture the remembered shapes that differ from `call`, which was just answered, in sizes only.

    The latest used come first, within limits of time, number and memory. done: the kinds of calls of this module for
    which this process has done it. Raises the progress's own cancellation only.
    """
    if call.capture_blocker is not None or call.forward_bypass is not None:
        return
    kind = _without_sizes(call.key)
    if kind in done:
        return
    done.add(kind)
    try:
        _capture_known_shapes(program, call, kind)
    except call.progress.cancellations:
        raise
    except Exception:
        logger.warning("Resolute: remembered shapes were not captured ahead", exc_info=True)


def _capture_known_shapes(program: Program, call: Call, kind: Hashable) -> None:
    cache = runtime.cache()
    known = reversed(cache.shapes.of_model(call.key.model))
    like = [graph for graph in known if graph.key != call.key and _without_sizes(graph.key) == kind]
    # Skip shapes with regions to compile: that would take too long here.
    missing = frozenset[str]().union(*(found.missing for found in locate(like, cache, call.tensors[0].device).values()))
    wanted = [graph.key for graph in like if graph.regions.isdisjoint(missing)][:_MAX_CAPTURES]
    started = time.perf_counter()
    captured = 0
    for number, key in enumerate(wanted):
        if time.perf_counter() - started > _MAX_SECONDS:
            break
        call.progress.raise_if_cancelled()
        if not _fits_in_memory(call, key):
            continue
        shape = "x".join(map(str, key.signature.latent_shape))
        call.progress.detail(f"capturing {number + 1} of {len(wanted)} remembered shapes: {shape}")
        tensors = [_dummy_tensor(spec, call.tensors[0].device) for _, spec in key.signature.tensors]
        if not cache.prepare(program, replace(call, key=key, tensors=tensors)):
            break
        captured += 1
    if wanted:
        seconds = time.perf_counter() - started
        logger.info("Resolute: captured %d of %d remembered shapes in %.1f s", captured, len(wanted), seconds)


def _without_sizes(key: GraphKey) -> Hashable:
    """A key without its sizes. If two are equal, one call's code can run on tensors of the other's sizes."""
    tensors = tuple(
        (name, len(spec.shape), spec.dtype, spec.device, spec.memory_format) for name, spec in key.signature.tensors
    )
    return (key.role, key.model, key.backend, tensors, repr(key.signature.values), repr(key.options))


def _dummy_tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    layout = torch.channels_last if spec.memory_format == "channels_last" else torch.contiguous_format
    return dummy_input(spec.shape, getattr(torch, spec.dtype), device, layout)


def _fits_in_memory(call: Call, key: GraphKey) -> bool:
    """Whether there is memory for a call at these sizes: the peak so far, scaled by the size of the latent."""
    device = call.tensors[0].device
    if device.type != "cuda":
        return True
    stats = torch.cuda.memory_stats(device)
    used = stats.get("allocated_bytes.all.peak", 0) - stats.get("allocated_bytes.all.current", 0)
    larger = math.prod(key.signature.latent_shape) / max(math.prod(call.key.signature.latent_shape), 1)
    return bool(used * larger <= comfy.model_management.get_free_memory(device))
