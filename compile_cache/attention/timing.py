"""Time a kernel without the host's launch time, and compare its result with a reference."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..torch_compat.private_names import spin

_RUNS = 5  # runs that are timed together
_LONG_SECONDS = 0.005  # a kernel that takes this long is timed by a single run
_CYCLES = 2_000_000  # of the GPU's clock, about a millisecond
_ATTEMPTS = 3
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative to torch's own choice
_TOLERANCE_OF_OTHERS = 1e-4


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run on a GPU, and wait for it. The caller must have run it at least once before."""
    with torch.cuda.device(device):
        once = _mean(run, 1)
        return once if once >= _LONG_SECONDS else _mean(run, _RUNS)


def _mean(run: Callable[[], object], runs: int) -> float:
    """Return the mean seconds of a run. The GPU spins until the host has launched all runs: a launch takes longer than
    a small kernel, and a replay has no such launches."""
    started, before, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    cycles = _CYCLES
    for _ in range(_ATTEMPTS):
        started.record()
        launching = time.perf_counter()
        spin(cycles)
        before.record()
        for _ in range(runs):
            run()
        after.record()
        milliseconds = 1000 * (time.perf_counter() - launching)
        after.synchronize()
        if milliseconds <= started.elapsed_time(before):
            break
        cycles *= 4
    return float(before.elapsed_time(after)) / 1000 / runs


def agrees(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_OF_OTHERS)
    exact = torch.promote_types(expected.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(each, dtype=exact) for each in (actual - expected, expected)]
    return bool(norms[0] <= tolerance * norms[1])
