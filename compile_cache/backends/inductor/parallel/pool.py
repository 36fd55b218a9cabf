"""The worker processes that compile regions. Lowering is Python code and keeps one processor busy, so processes, not
threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ...base import Call
from .failures import NotCompiledError
from .process import Compiled, WorkerProcess

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job

_MOST = 16
_MOST_BEHIND = 2  # each takes 0.7 GiB of the GPU's memory from the model that samples
_OTHERS = 2  # processors left for the process that traces and compares, and for the rest of the machine
_MOST_WANTED = 61  # the most processes that Windows can wait for
_MEMORY = 1 << 30  # bytes of memory for torch in each process
_GPU_MEMORY = 3 << 29  # bytes of GPU memory for each process's CUDA context
_PROMPT_MEMORY = 4 << 30  # bytes of GPU memory that are left to the prompt which waits for the processes


def worker_count(wanted: int | None, device: torch.device, reclaimable: int | None = None) -> int:
    """The number of workers to use: `wanted`, or with None what processors and memory allow. If the
    processors allow one only, that is none. If the GPU's memory allows one only, it is used where weights can be
    offloaded to make room.

    On CUDA all workers together get what is free beside _PROMPT_MEMORY, `reclaimable` bytes counted as free.
    """
    processes = _processes(wanted)
    count = min(processes, _fitting_on(device, reclaimable or 0))
    return count if count > 1 or (reclaimable is not None and processes > 1) else 0


def worker_count_before(wanted: int | None, call: Call, done: int, total: int) -> int:
    """The number of workers for a call that waits for them. done, total: of its regions."""
    device, weights = call.tensors[0].device, call.weights
    count = worker_count(wanted, device)
    # While the weights of a first call come, the card looks empty.
    if weights.streams or (weights.pages and not count):
        within_reach = worker_count(wanted, device, weights.reclaimable())
        count = min(within_reach, max(total - done, 1))  # each takes memory from weights
    return count


def worker_count_behind(wanted: int | None, device: torch.device) -> tuple[int, bool]:
    """The number of workers beside a model that samples, 0 where the processors leave no room, and False. If the GPU's
    memory leaves none: one, and True, because it may be there only while nothing samples.
    """
    if wanted is not None and wanted < 2:
        return 0, False
    processes, fitting = min(_processes(wanted, others=1), _MOST_BEHIND), _fitting_on(device)
    return (min(processes, fitting), False) if fitting else (min(processes, 1), True)


def fits_while_idle(device: torch.device) -> bool:
    """One worker's memory is free, if nothing else needs any."""
    return device.type != "cuda" or bool(torch.cuda.mem_get_info(device)[0] >= _GPU_MEMORY)


def room_for(count: int) -> int:
    """Bytes of GPU memory for so many workers beside a prompt."""
    return count * _GPU_MEMORY + _PROMPT_MEMORY


def may_have_workers(wanted: int | None) -> bool:
    """True if processors and memory allow more than one worker. Imports nothing, and asks for no GPU."""
    return _processes(wanted) > 1


def _processes(wanted: int | None, others: int = _OTHERS) -> int:
    return min(_processors() - others, _MOST, _fitting()) if wanted is None else min(wanted, _MOST_WANTED)


def _fitting_on(device: torch.device, reclaimable: int = 0) -> int:
    """The number whose CUDA contexts have room beside the prompt."""
    if device.type != "cuda":
        return _MOST_WANTED
    free, _ = torch.cuda.mem_get_info(device)
    return max(int((free + reclaimable - _PROMPT_MEMORY) // _GPU_MEMORY), 0)


def _fitting() -> int:
    """The number that fits into half of the free memory; the models get the other half."""
    try:
        import psutil  # type: ignore[import-untyped]  # ComfyUI requires it
    except ImportError:
        return _MOST
    return int(psutil.virtual_memory().available // 2 // _MEMORY)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """One process that imports torch, and its children, which compile. Thread-safe.

    The processes start when they are needed, or earlier with `start`, and end when they were idle for a while.
    """

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive

    def start(self, low: bool = False) -> WorkerProcess:
        """Start the process, which imports torch. low: at low priority. Raises OSError."""
        with self._lock:
            if self._process is None or not self._process.alive:
                self.close()  # a process that ended by itself may still have threads and pipes here
                self._process = WorkerProcess(low)
            return self._process

    @contextmanager
    def in_use(self, count: int, device: torch.device, has_room: bool = False, low: bool = False) -> Iterator[None]:
        """Start `count` children for jobs on a device, unless there are children already, and keep them. Idle children
        of another device end.

        low: at low priority. Raises OSError where no process can be started.

        Fewer, but at least one, where less GPU memory is free than when `count` was found, because weights came
        meanwhile; not with `has_room`: `Weights.room` keeps what they need.
        """
        with self._lock:
            process = self.start(low)
            if process.device is not None and (process.device, process.low) != (device, low) and not process.is_busy:
                self.close()
                process = self.start(low)
            process.start_children(count if has_room else max(min(count, _fitting_on(device)), 1), device, low)
            process.users += 1
        try:
            yield
        finally:
            with self._lock:
                process.users -= 1

    def submit(self, job: Job) -> Compiled:
        """Have a job done while they are `in_use`. The future raises NotCompiledError if no worker compiles it."""
        with self._lock:
            if self._process is None:
                raise NotCompiledError("no process that compiles was started")
            return self._process.submit(job)

    def end_unless_busy(self) -> None:
        """End the processes now, for the memory that they hold, unless they have jobs."""
        with self._lock:
            if self._process is not None and not self._process.is_busy:
                self.close()

    def close(self) -> None:
        """End the processes. `start` and `in_use` start new ones."""
        process = self._process
        if process is not None:
            process.end()
