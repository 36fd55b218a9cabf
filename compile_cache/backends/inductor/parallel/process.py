"""One process that runs worker.py, and what this process keeps for it: two threads, its jobs, its temporary folder."""

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
from concurrent.futures import Future
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

Compiled = Future[tuple[Artifact, float]]  # and the seconds that it took

_KILL_SECONDS = 5.0  # that a killed process may take to end


class NotCompiledError(RuntimeError):
    """No worker compiled a job."""


class HungError(NotCompiledError):
    """The processes that had the job gave no result for too long, and were ended."""


class WorkerProcess:
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
        self._heard = time.monotonic()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: dict[int, Compiled] = {}
        self._numbers = itertools.count()
        self._has_children = False
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        for thread in (self._reader, threading.Thread(target=self._write, daemon=True)):
            thread.start()

    @property
    def alive(self) -> bool:
        return not self._ended and self._process.poll() is None

    @property
    def is_busy(self) -> bool:
        return self.alive and bool(self._pending)

    def is_silent_for(self, seconds: float) -> bool:
        """True if so long it neither gave a result nor got a job."""
        return time.monotonic() - self._heard > seconds

    def start_children(self, count: int, device: torch.device) -> None:
        """Once; later calls do nothing."""
        if not self._has_children:
            self._has_children = True
            self._messages.put((count, str(device)))

    def submit(self, job: Job, settings: WorkerSettings) -> Compiled:
        """The future raises NotCompiledError."""
        number, future = next(self._numbers), Compiled()
        self._pending[number] = future
        self._heard = time.monotonic()
        self._messages.put((number, vars(settings), vars(job)))
        if self._ended:  # perhaps before the reader could see this job
            self.give_up(NotCompiledError("the processes that compile ended"))
        return future

    def end(self) -> None:
        """Kill the process and its children."""
        self.give_up(NotCompiledError("the processes that compile were ended"))
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver can keep a killed process alive
            self._process.wait(_KILL_SECONDS)
        self._messages.put(None)
        self._reader.join(_KILL_SECONDS)  # the pipe ends with the last child: then their GPU memory is free

    def give_up(self, error: NotCompiledError) -> None:
        """Let all jobs that have no result raise this error."""
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._pending.popitem()[1].set_exception(error)

    def _kill(self) -> None:
        if self._process.poll() is not None:  # its process id may belong to another process by now
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
        why = "the processes that compile ended"
        try:
            with self._process.stdout as stream:
                while True:
                    number, made, seconds = worker.receive(stream)
                    future = self._pending.pop(number)
                    self._heard = time.monotonic()
                    _settle(future, made, seconds)
        except EOFError:  # all processes that wrote there have ended
            pass
        except Exception as error:  # noqa: BLE001 (unpickling nonsense raises any class)
            why = f"the processes that compile answered nonsense, and were ended: {first_line(error)}"
            self._kill()
        if self._pending:
            logger.warning("Resolute: %s. What they had is compiled when a call comes to it", why)
        self._ended = True
        self.give_up(NotCompiledError(why))
        self._folder.remove()


def _settle(future: Compiled, made: dict[str, Any] | str, seconds: float) -> None:
    """Give a future the worker's answer: the parts of an artifact, or the text of an error."""
    try:
        if isinstance(made, str):
            raise NotCompiledError(made)
        future.set_result((Artifact(**made), float(seconds)))
    except NotCompiledError as error:
        future.set_exception(error)
    except (TypeError, ValueError) as error:
        future.set_exception(NotCompiledError(f"the process that compiled it answered nonsense: {error}"))
