"""The worker processes that compile regions. Lowering is Python code and keeps one processor busy, so processes, not
threads.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....store.artifact_store import Artifact
from .process import WorkerProcess

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job, WorkerSettings

IDLE_SECONDS = 60.0  # after the last job the processes stay this long: the next model of a workflow comes soon
_IDLE_ROUNDS = 10  # so many times IDLE_SECONDS for early jobs that no call has asked for yet
_POLL_SECONDS = 0.1  # between two checks for a cancel
# Without a result for so long the processes count as hung. They import torch first, and a job takes up to a minute.
_SILENT_SECONDS = 600.0

_MOST = 16
_OTHERS = 2  # processors left for the process that traces and compares, and for the rest of the machine
_MOST_WANTED = 61  # the most processes that Windows can wait for
_MEMORY = 1 << 30  # bytes of memory for torch in each process
_GPU_MEMORY = 3 << 29  # bytes of GPU memory for each process's CUDA context
_PROMPT_MEMORY = 4 << 30  # bytes of GPU memory that are left to the prompt which waits for the processes


class HungError(RuntimeError):
    """The processes gave no result for too long and were ended. `numbers`: the jobs that they had."""

    def __init__(self, seconds: float, numbers: Iterable[int]) -> None:
        super().__init__(f"the processes that compile gave no result for {seconds:.0f} s, and were ended")
        self.numbers = frozenset(numbers)


JobResult = tuple[int, "Artifact | str", float]


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


def _result(pending: dict[int, int], message: tuple[int, dict[str, Any] | str, float]) -> JobResult:
    submitted, made, seconds = message
    number = pending.pop(submitted)
    try:
        return number, made if isinstance(made, str) else Artifact(**made), float(seconds)
    except (TypeError, ValueError) as error:
        return number, f"the process that compiles answered nonsense: {error}", 0.0


@dataclass(frozen=True, eq=False)
class EarlyJob:
    """A job that was submitted before a call came to its region. owner: the number of the module that will need it."""

    owner: int
    process: WorkerProcess
    number: int
    results: queue.SimpleQueue[Any]
    settings: WorkerSettings

    @property
    def has_result(self) -> bool:
        """True if its result came, or will come unless the process fails."""
        return self.process.alive or not self.results.empty()


class WorkerPool:
    """One process that imports torch, and its children, which compile. Thread-safe.

    The processes start when they are needed, or earlier with `start`, and end IDLE_SECONDS after the last job.
    """

    def __init__(self) -> None:
        self._early: dict[str, EarlyJob] = {}  # by the key of a region
        self._process: WorkerProcess | None = None
        self._wanted: tuple[int, torch.device, bool] | None = None
        self._users = 0
        self._timer: threading.Timer | None = None
        self._idle_rounds_left = 0  # how often `_end_unused` still waits for early jobs
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

    def submit_early(self, owner: int, job: Job, settings: WorkerSettings) -> None:
        """Submit a job whose result `results` will want later. It does not wait, and starts no process."""
        with self._lock:
            process = self._process
            if process is not None and process.alive:
                results: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._idle_rounds_left = _IDLE_ROUNDS
                number = process.submit(results, job, settings)
                self._early[job.key] = EarlyJob(owner, process, number, results, settings)

    def forget(self, owner: int) -> None:
        """The module is gone, or its first call was answered: it needs no early job any more."""
        with self._lock:  # a module that was garbage collected is forgotten by another thread
            self._early = {key: early for key, early in self._early.items() if early.owner != owner}

    def has_early_for(self, owner: int) -> bool:
        with self._lock:
            return any(early.owner == owner for early in self._early.values())

    def has_early(self, key: str, settings: WorkerSettings) -> bool:
        """True if a region has an early job, under equal settings, whose result is here or will come."""
        with self._lock:
            early = self._early.get(key)
            if early is not None and (early.settings != settings or not early.has_result):
                del self._early[key]
                return False
            return early is not None

    def _submit(
        self,
        process: WorkerProcess,
        results: queue.SimpleQueue[Any],
        number: int,
        job: Job | str,
        settings: WorkerSettings,
    ) -> int | None:
        """The number of a job that will put its result into `results`; None for an early one that is lost."""
        if not isinstance(job, str):
            return process.submit(results, job, settings)
        with self._lock:
            early = self._early.pop(job, None)
        if early is None:  # its module was forgotten meanwhile
            return None
        return early.process.redirect(early.number, early.results, results, -1 - number)  # no process has such a number

    def results(
        self, jobs: Iterable[tuple[int, Job | str] | None], settings: WorkerSettings
    ) -> Generator[JobResult | None]:
        """Submit numbered jobs to the children that `prepare` started. An early job is given by its key; if the process
        lost it, it has no result. None submits nothing.

        Yields (number, artifact or error text, seconds) of each job when it is done, and None every _POLL_SECONDS
        without a result, so that the caller can check for a cancel. A caller that stops early, by an error or by
        closing the generator, ends the processes. Raises RuntimeError if the processes end by themselves or answer
        something else than results, and HungError after _SILENT_SECONDS without a result.
        """
        with self._lock:
            assert self._wanted is not None, "`prepare` comes first"
            self.prepare(*self._wanted)  # again: they may have ended after IDLE_SECONDS
            process = self._process
            assert process is not None
            self._users += 1
        try:
            results: queue.SimpleQueue[Any] = queue.SimpleQueue()
            pending: dict[int, int] = {}
            for each in jobs:
                if each is not None and (submitted := self._submit(process, results, *each, settings)) is not None:
                    pending[submitted] = each[0]
                while not results.empty():  # before the next trace: a region that the caller saves survives a kill
                    yield _result(pending, results.get())
            heard = time.monotonic()
            while pending:
                try:
                    message = results.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    if not process.alive and results.empty():
                        raise RuntimeError("the processes that compile ended") from None
                    if time.monotonic() - heard > _SILENT_SECONDS:
                        raise HungError(_SILENT_SECONDS, pending.values()) from None
                    yield None
                    continue
                yield _result(pending, message)
                heard = time.monotonic()  # not before: the caller compares, which may take long
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._end_when_idle()

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
        if self._process is None:
            return
        self._timer = threading.Timer(IDLE_SECONDS, self._end_unused)
        self._timer.daemon = True
        self._timer.start()

    def _end_unused(self) -> None:
        with self._lock:
            if not self._users and self._process is not None and self._process.is_busy and self._idle_rounds_left:
                self._idle_rounds_left -= 1
                self._end_when_idle()
            elif not self._users:
                self.close()
