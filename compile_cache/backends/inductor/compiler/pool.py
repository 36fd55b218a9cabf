"""The worker processes that compile regions. Processes, not threads, because lowering is Python code: threads would
share one processor.
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
_OTHERS = 2  # processors left free for the process that samples and traces, and for the rest of the machine
_MOST_WANTED = 61  # the most processes that Windows can wait for
_MEMORY = 1 << 30  # bytes of memory for torch in each process


def worker_count(wanted: int | None) -> int:
    """The number of workers: `wanted`, at most 61; if None, 1 to 16 by processors and free memory, or 0 if memory does
    not suffice for one. Does not import inductor.
    """
    return min(max(_processors() - _OTHERS, 1), _MOST, _fitting()) if wanted is None else min(wanted, _MOST_WANTED)


def _fitting() -> int:
    """The number of workers that fit into half of the free memory; the models get the other half."""
    try:
        import psutil  # type: ignore[import-untyped]  # ComfyUI requires it
    except ImportError:
        return _MOST
    return int(psutil.virtual_memory().available // 2 // _MEMORY)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """One process that imports torch, and its child processes, which compile. Thread-safe.

    The processes start on demand, or earlier with `start`, and end after an idle timeout.
    """

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive

    def start(self) -> WorkerProcess:
        """Start the process, which imports torch. Raises OSError."""
        with self._lock:
            if self._process is None or not self._process.alive:
                self.close()  # a process that exited by itself may still have threads and pipes here
                self._process = WorkerProcess()
            return self._process

    @contextmanager
    def in_use(self, count: int, device: torch.device) -> Iterator[None]:
        """Start `count` children that compile for a device, unless children already run, and keep them alive in this
        block. Ends idle children of another device first.

        Raises OSError if no process can be started.
        """
        with self._lock:
            process = self.start()
            if process.device not in (None, device) and not process.is_busy:
                self.close()
                process = self.start()
            process.start_children(count, device)
            process.users += 1
        try:
            yield
        finally:
            with self._lock:
                process.users -= 1

    def submit(self, job: Job) -> Compiled:
        """Submit a job; only inside `in_use`. The future raises NotCompiledError if no worker compiles the job."""
        with self._lock:
            if self._process is None:
                raise NotCompiledError("no process that compiles was started")
            return self._process.submit(job)

    def close(self) -> None:
        """End the processes. `start` and `in_use` start new ones."""
        process = self._process
        if process is not None:
            process.end()
