"""Whether a call looks at all of its regions before the first one is compiled, so that they can be compiled at once."""

from __future__ import annotations

import os

import torch

LOOKED = object()  # in place of a region's result, while a call only looks

_MOST = 16
_OTHERS = 2  # processors for the process that traces and compares, and for everybody else
_MOST_WANTED = 61  # Windows waits for no more processes at once
_MEMORY = 1 << 30  # bytes, for torch in each process
_GPU_MEMORY = 1 << 30  # bytes, for its CUDA context


class LookAhead(BaseException):
    """Leaves a call that came to a region without an artifact, to look at the others first.

    No Exception, so that no patch in between takes it for a failure.
    """


def worker_count(wanted: int | None, device: torch.device) -> int:
    """How many workers to use on this machine: `wanted`, or what it has room for. Fewer than 2 is none."""
    count = min(_processors() - _OTHERS, _MOST, _fitting()) if wanted is None else min(wanted, _MOST_WANTED)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        count = min(count, int(free // 2 // _GPU_MEMORY))
    return count if count > 1 else 0


def _fitting() -> int:
    """How many fit into the memory that is free, half of which is left to the models."""
    try:
        import psutil  # type: ignore[import-untyped]  # ComfyUI requires it
    except ImportError:
        return _MOST
    return int(psutil.virtual_memory().available // 2 // _MEMORY)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
