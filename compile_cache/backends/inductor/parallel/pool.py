"""The worker processes that compile regions. Lowering is Python code and keeps one processor busy, so processes, not
threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .process import Compiled, HungError, NotCompiledError, WorkerProcess

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job, WorkerSettings

IDLE_SECONDS = 60.0  # after the last job the processes stay this long: the next model of a workflow comes soon
_POLL_SECONDS = 0.1  # between two checks for a cancel
# Without a result for so long the processes count as hung. They import torch first, and a job takes up to a minute.
_SILENT_SECONDS = 600.0

_MOST = 16
_OTHERS = 2  # processors left for the process that traces and compares, and for the rest of the machine
_MOST_WANTED = 61  # the most processes that Windows can wait for
_MEMORY = 1 << 30  # bytes of memory for torch in each process
_GPU_MEMORY = 3 << 29  # bytes of GPU memory for each process's CUDA context
_PROMPT_MEMORY = 4 << 30  # bytes of GPU memory that are left to the prompt which waits for the processes


def worker_count(wanted: int | None, device: torch.device, reclaimable: int | None = None) -> int:
    """The number of workers to use: `wanted`, or with None what processors and memory allow. One that only processors
    allow is none; one that only the GPU's memory allows is worth it where weights make room for it.

    On CUDA all workers together get what is free beside _PROMPT_MEMORY, `reclaimable` bytes counted as free.
    """
    processes = _processes(wanted)
    count = min(processes, _fitting_on(device, reclaimable or 0))
    return count if count > 1 or (reclaimable is not None and processes > 1) else 0


def room_for(count: int) -> int:
    """Bytes of GPU memory for so many workers beside a prompt."""
    return count * _GPU_MEMORY + _PROMPT_MEMORY


def may_have_workers(wanted: int | None) -> bool:
    """True if processors and memory allow more than one worker. Imports nothing, and asks for no GPU."""
    return _processes(wanted) > 1


def _processes(wanted: int | None) -> int:
    return min(_processors() - _OTHERS, _MOST, _fitting()) if wanted is None else min(wanted, _MOST_WANTED)


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

    The processes start when they are needed, or earlier with `start`, and end IDLE_SECONDS after the last job.
    """

    def __init__(self) -> None:
        # By the key of a region: jobs that were submitted before a call came to it, with the number of the module that
        # will need it.
        self._early: dict[str, tuple[int, WorkerSettings, Compiled]] = {}
        self._process: WorkerProcess | None = None
        self._wanted: tuple[int, torch.device, bool] | None = None
        self._users = 0
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive

    def start(self) -> None:
        """Start the process, which imports torch. It ends after IDLE_SECONDS without `prepare`. Raises OSError."""
        with self._lock:
            if not self.running:
                self.close()  # a process that ended by itself still has threads and pipes here
                self._process = WorkerProcess()
            self._end_when_idle()

    def prepare(self, count: int, device: torch.device, has_room: bool = False) -> None:
        """Start `count` children for jobs on a device, unless there are children already. Raises OSError.

        Fewer, but at least one, where less GPU memory is free than when `count` was found, because weights came
        meanwhile; not with `has_room`: `Weights.room` keeps what they need.
        """
        with self._lock:
            self._wanted = (count, device, has_room)
            self.start()
            assert self._process is not None
            self._process.start_children(count if has_room else max(min(count, _fitting_on(device)), 1), device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the processes that `prepare` started, or start them again. An error ends them with all their jobs.

        Raises OSError where they cannot be started.
        """
        with self._lock:
            assert self._wanted is not None, "`prepare` comes first"
            self.prepare(*self._wanted)  # again: they may have ended after IDLE_SECONDS
            self._users += 1
        try:
            yield
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._end_when_idle()

    def submit(self, job: Job, settings: WorkerSettings) -> Compiled:
        """Have a job done while they are `in_use`. The future raises NotCompiledError if no worker compiles it."""
        with self._lock:
            if self._process is None:  # they hung
                raise NotCompiledError("the processes that compile were ended")
            return self._process.submit(job, settings)

    def wait(self, jobs: Collection[Compiled]) -> None:
        """Wait until one of the jobs is done, at most _POLL_SECONDS, so that the caller can check for a cancel.

        After _SILENT_SECONDS without a result the processes end, and their jobs raise HungError.
        """
        done = wait(jobs, _POLL_SECONDS, FIRST_COMPLETED).done
        process = self._process
        if not done and process is not None and process.is_silent_for(_SILENT_SECONDS):
            silence = f"the processes that compile gave no result for {_SILENT_SECONDS:.0f} s, and were ended"
            process.give_up(HungError(silence))
            self.close()

    def submit_early(self, owner: int, job: Job, settings: WorkerSettings) -> None:
        """Submit a job whose result `take_early` will want later. It does not wait, and starts no process."""
        with self._lock:
            if self.running:
                self._early[job.key] = (owner, settings, self.submit(job, settings))

    def take_early(self, key: str, settings: WorkerSettings) -> Compiled | None:
        """The early job of a region under equal settings, if there is one that did not fail."""
        with self._lock:
            return self._early.pop(key)[2] if self.has_early(key, settings) else None

    def has_early(self, key: str, settings: WorkerSettings) -> bool:
        with self._lock:
            _, under, job = self._early.get(key, (0, None, None))
            return job is not None and under == settings and not (job.done() and job.exception())

    def has_early_for(self, owner: int) -> bool:
        with self._lock:
            return any(each == owner for each, *_ in self._early.values())

    def forget(self, owner: int) -> None:
        """The module is gone, or its first call was answered: it needs no early job any more."""
        with self._lock:  # a module that was garbage collected is forgotten by another thread
            self._early = {key: early for key, early in self._early.items() if early[0] != owner}

    def end_unless_busy(self) -> None:
        """End the processes now, for the memory that they hold, unless they have jobs for a later call."""
        with self._lock:
            if not self._users and not (self._process is not None and self._process.is_busy):
                self.close()

    def close(self) -> None:
        """End the processes. `start` and `prepare` start new ones."""
        with self._lock:
            process, self._process = self._process, None
            if self._timer is not None:
                self._timer.cancel()
        if process is not None:
            process.end()

    def _end_when_idle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._timer = threading.Timer(IDLE_SECONDS, self._end_unused)
            self._timer.daemon = True
            self._timer.start()

    def _end_unused(self) -> None:
        with self._lock:
            process = self._process
            if self._users or process is None:
                return
            if process.is_busy and not process.is_silent_for(_SILENT_SECONDS):
                self._end_when_idle()  # early jobs go on
            else:
                self.close()
