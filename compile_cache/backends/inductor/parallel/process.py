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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....errors import first_line
from ....store.temporary_folders import TemporaryFolder
from . import worker

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job, WorkerSettings

logger = logging.getLogger(__name__)

_KILL_SECONDS = 5.0  # that a killed process may take to end


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
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self._has_children = False
        self._lock = threading.Lock()  # a result goes where `_pending` says
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

    @property
    def is_busy(self) -> bool:
        return self.alive and bool(self._pending)

    def redirect(
        self, number: int, before: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any], new: int
    ) -> int | None:
        """Let `results` get the result of a job in place of `before`: with number `new` if it came already. Returns the
        number that it will have, None if it will never come."""
        with self._lock:
            if not before.empty():
                results.put((new, *before.get()[1:]))
                return new
            if self.alive and number in self._pending:
                self._pending[number] = results
                return number
            return None

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
                    with self._lock:
                        self._pending.pop(number).put((number, made, seconds))
        except EOFError:  # all processes that wrote there have ended
            self._folder.remove()
        except Exception as error:  # noqa: BLE001 (unpickling nonsense raises any class; `results` sees the end)
            logger.warning("Resolute: a process that compiles answered nonsense, and is ended: %s", first_line(error))
            self._kill()
            self._folder.remove()
