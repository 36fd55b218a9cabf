"""End a failed or cancelled capture, and restore the state of torch's allocators and random numbers."""

from __future__ import annotations

import ctypes
import logging
import traceback
from typing import Any

import torch

from ...errors import first_line
from ...torch_compat.private_names import end_allocate_to_pool, release_pool
from . import pools

logger = logging.getLogger(__name__)


def leak_tensors(error: BaseException) -> None:
    """Leak the tensors of a broken capture, which the frames of its error keep alive.

    Under cudaMallocAsync, freeing memory of a broken capture ends the process, in a destructor where nothing can catch
    it. The interpreter would empty a list of errors when it exits, so we leak a reference instead.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


def clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error, its contexts and its causes: they keep tensors of the capture alive."""
    seen, errors = set[int](), [error]
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            errors += [each.__context__, each.__cause__]


def abandon(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """End a capture on the current stream, which must be the capture's stream.

    If the driver broke the capture, `capture_end` raises before it notifies torch's allocators and random number
    generators. The device allocator would then count every later allocation to the capture: it would free nothing, and
    refuse every further capture. The pinned-memory allocator cannot be notified, and refuses captures in this pool.
    """
    try:
        graph.capture_end()
    except RuntimeError as error:
        leak_tensors(error)
        logger.debug("the broken capture ended with: %s", first_line(error))
        try:
            end_allocate_to_pool(device, pool)
            release_pool(device, pool)  # a deleted graph releases its pool only if its capture succeeded
        except RuntimeError as ended:
            logger.debug("torch's allocator had ended the capture: %s", first_line(ended))
        pools.shared.broke(device)
        _end_random_numbers(device)


def _end_random_numbers(device: int) -> None:
    """Take the device's random number generator out of capture mode, which only a successful capture does.

    Until then the next random number and the next replay of any graph raise "Offset increment outside graph capture
    encountered unexpectedly". So capture a graph of one kernel: torch warns of an empty graph.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        number = torch.zeros(1, device=f"cuda:{device}")
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            number.zero_()
        finally:
            graph.capture_end()
        graph.reset()
    except RuntimeError as error:
        logger.warning("Resolute: restart ComfyUI if random numbers on the GPU fail: %s", first_line(error))
