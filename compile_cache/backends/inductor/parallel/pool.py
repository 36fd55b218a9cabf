"""The worker processes that compile regions. Lowering is Python code and keeps one processor busy, so processes, not
threads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....errors import first_line
from ....store.artifact_store import Artifact
from ....store.temporary_folders import TemporaryFolder
from . import worker

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job, WorkerSettings

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0  # after the last job the processes stay this long: the next model of a workflow comes soon
_KILL_SECONDS = 5.0  # that a killed process may take to end
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


def worker_count(wanted: int | None, device: torch.device) -> int:
    """How many workers to use: `wanted`, or with None what processors and memory allow. 0 where it would be only one.

    On CUDA all workers together get what is free beside _PROMPT_MEMORY.
    """
    count = _processes(wanted)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        count = min(count, max(int((free - _PROMPT_MEMORY) // _GPU_MEMORY), 0))
    return count if count > 1 else 0


def may_have_workers(wanted: int | None) -> bool:
    """Whether processors and memory allow more than one worker. Imports nothing, and asks for no GPU."""
    return _processes(wanted) > 1


def _processes(wanted: int | None) -> int:
    return min(_processors() - _OTHERS, _MOST, _fitting()) if wanted is None else min(wanted, _MOST_WANTED)


def _fitting() -> int:
    """How many fit into half of the free memory; the models get the other half."""
    try:
        import psutil  # type: ignore[import-untyped]  # ComfyUI requires it
    except ImportError:
        return _MOST
    return int(psutil.virtual_memory().available // 2 // _MEMORY)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _WorkerProcess:
    """A process that runs worker.py, its children, and two threads of ours: one writes to it, one reads from it."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder()
        command = [sys.executable, str(Path(worker.__file__).resolve()), str(self._folder.path)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError:
            self._folder.remove()
            raise
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self._has_children = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        for thread in (self._reader, threading.Thread(target=self._write, daemon=True)):
            thread.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start_children(self, count: int, device: torch.device) -> None:
        """Once; later calls do nothing."""
        if not self._has_children:
            self._has_children = True
            self._messages.put((count, str(device)))

    def submit(self, results: queue.SimpleQueue[Any], job: Job, settings: WorkerSettings) -> int:
        """Returns the job's number. `results` gets (number, artifact or error text, seconds)."""
        number = next(self._numbers)
        self._pending[number] = results
        self._messages.put((number, vars(settings), vars(job)))
        return number

    def end(self) -> None:
        """Kill the process and its children."""
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver can keep a killed process alive
            self._process.wait(_KILL_SECONDS)
        self._messages.put(None)
        self._reader.join(_KILL_SECONDS)  # the pipe ends with the last child: then their GPU memory is free

    def _kill(self) -> None:
        if not self.alive:  # its process id may belong to another process by now
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            while (message := self._messages.get()) is not None:
                worker.send(stream, message)

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as stream:
                while True:
                    number, made, seconds = worker.receive(stream)
                    self._pending.pop(number).put((number, made, seconds))
        except EOFError:  # all processes that wrote there have ended
            self._folder.remove()
        except Exception as error:  # noqa: BLE001 (unpickling nonsense raises any class; `results` sees the end)
            logger.warning("Resolute: a process that compiles answered nonsense, and is ended: %s", first_line(error))
            self._kill()
            self._folder.remove()


def _result(pending: dict[int, int], message: tuple[int, dict[str, Any] | str, float]) -> JobResult:
    submitted, made, seconds = message
    number = pending.pop(submitted)
    try:
        return number, made if isinstance(made, str) else Artifact(**made), float(seconds)
    except (TypeError, ValueError) as error:
        return number, f"the process that compiles answered nonsense: {error}", 0.0


class WorkerPool:
    """One process that imports torch, and its children, which compile. Thread-safe.

    The processes start when they are needed, or earlier with `start`, and end IDLE_SECONDS after the last job.
    """

    def __init__(self) -> None:
        self._process: _WorkerProcess | None = None
        self._wanted: tuple[int, torch.device] | None = None
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
                self._process = _WorkerProcess()
            self._end_when_idle()

    def prepare(self, count: int, device: torch.device) -> None:
        """Start `count` children for jobs on a device, unless there are children already. Raises OSError."""
        with self._lock:
            self._wanted = (count, device)
            self.start()
            assert self._process is not None
            self._process.start_children(count, device)

    def results(self, jobs: Iterable[tuple[int, Job]], settings: WorkerSettings) -> Generator[JobResult | None]:
        """Submit numbered jobs to the children that `prepare` started.

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
            for number, job in jobs:
                pending[process.submit(results, job, settings)] = number
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
            if not self._users:
                self.close()
