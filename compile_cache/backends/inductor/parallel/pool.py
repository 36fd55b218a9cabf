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

from .failures import NotCompiledError
from .process import Compiled, WorkerProcess

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job

_MOST = 16
_MOST_BEHIND = 4  # beside a model that samples
_OTHERS = 2  # processors left for the process that traces and compares, and for the rest of the machine
_MOST_WANTED = 61  # the most processes that Windows can wait for
_MEMORY = 1 << 30  # bytes of memory for torch in each process


def worker_count(wanted: int | None) -> int:
    """The number of workers for a call that waits: `wanted`, or with None what processors and memory allow. If they
    allow one only, that is none. Imports nothing.
    """
    count = _processes(wanted)
    return count if count > 1 else 0


def worker_count_behind(wanted: int | None) -> int:
    """The number of workers beside a model that samples: a quarter of the processors, or two. 0 where the processors
    leave no room.
    """
    if wanted is not None and wanted < 2:
        return 0
    return max(min(_processes(wanted, others=1), max(_processors() // 4, 2), _MOST_BEHIND), 0)


def _processes(wanted: int | None, others: int = _OTHERS) -> int:
    return min(_processors() - others, _MOST, _fitting()) if wanted is None else min(wanted, _MOST_WANTED)


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
    def in_use(self, count: int, device: torch.device, low: bool = False) -> Iterator[None]:
        """Start `count` children for jobs on a device, unless there are children already, and keep them. Idle children
        of another device end.

        low: at low priority. Raises OSError where no process can be started.
        """
        with self._lock:
            process = self.start(low)
            is_other = process.low != low or process.device not in (None, device)
            if is_other and not process.is_busy:
                self.close()
                process = self.start(low)
            process.start_children(count, device)
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

    def close(self) -> None:
        """End the processes. `start` and `in_use` start new ones."""
        process = self._process
        if process is not None:
            process.end()
