"""The one test for out-of-memory errors."""

from __future__ import annotations

import torch

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_ACCELERATOR_ERROR: type[BaseException] | None = getattr(torch, "AcceleratorError", None)  # torch 2.8 and newer


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error means that the device has no memory left.

    The allocator raises OutOfMemoryError; the driver reports the same as an AcceleratorError, for example at a graph
    launch. ComfyUI's `model_management.is_oom` accepts both.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if _ACCELERATOR_ERROR is None or not isinstance(error, _ACCELERATOR_ERROR):
        return False
    return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY or "out of memory" in str(error).lower()
