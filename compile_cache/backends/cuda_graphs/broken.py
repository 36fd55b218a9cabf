"""End a capture that is not used, so that the process goes on as if it had not been."""

from __future__ import annotations

import ctypes
import logging
import traceback
from typing import Any

import torch

from ...errors import first_line
from ...torch_facts.private_names import end_allocate_to_pool, release_pool
from . import pools

logger = logging.getLogger(__name__)


def keep_for_good(error: BaseException) -> None:
    """Leak the tensors of a broken capture, which the frames of its error hold.

    Under cudaMallocAsync, freeing memory of a broken capture ends the process, from a destructor where nothing can
    catch it. A list of errors would be emptied when the interpreter exits, so leak a reference instead.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


def let_go(error: BaseException | None) -> None:
    """Empty the frames of an error and of those that it took the place of: they hold tensors of the capture."""
    seen, errors = set[int](), [error]
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            errors += [each.__context__, each.__cause__]


def abandon(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """End a capture on the current stream, which is that of the capture.

    If the driver broke it, `capture_end` raises before it tells torch's allocators and torch's random numbers. The
    allocator of the device would then take every later allocation for a part of the capture: it would free nothing any
    more, and refuse every further capture. That of pinned memory cannot be told, and refuses captures in this pool.
    """
    try:
        graph.capture_end()
    except RuntimeError as error:
        keep_for_good(error)
        logger.debug("the broken capture ended with: %s", first_line(error))
        try:
            end_allocate_to_pool(device, pool)
            release_pool(device, pool)  # a graph that is deleted does that only if its capture ended well
        except RuntimeError as ended:
            logger.debug("torch's allocator had ended the capture: %s", first_line(ended))
        pools.shared.broke(device)
        _end_random_numbers(device)


def _end_random_numbers(device: int) -> None:
    """Make torch count random numbers on the device as ordinary ones again. Only a capture that ends well does so.

    Until then the next random number and the next replay of any graph raise "Offset increment outside graph capture
    encountered unexpectedly". So record a graph of one kernel: of an empty graph torch warns.
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
