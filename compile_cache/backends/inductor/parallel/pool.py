"""Compile many regions at once, in processes of their own: lowering is Python, and uses one processor each."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....store.artifact_store import Artifact
from . import worker

if TYPE_CHECKING:  # which imports inductor, and processes are started before that
    from .job import Job, Settings

logger = logging.getLogger(__name__)

STAY = 60.0  # seconds after the last job: the next model of a workflow comes soon
_GONE = 5.0  # seconds that a killed process may take to be gone
_POLL = 0.1  # seconds between two looks at whether somebody cancels

Answer = tuple[int, "Artifact | str", float]


class _WorkerProcess:
    """One process of `worker`, with its children, and the threads that write to it and read from it."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="resolute-")
        command = [sys.executable, str(Path(worker.__file__).resolve()), self._folder]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self._called_up = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        for thread in (self._reader, threading.Thread(target=self._write, daemon=True)):
            thread.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call_up(self, count: int, device: torch.device) -> None:
        """Its children start, once, and get to know a device."""
        if not self._called_up:
            self._called_up = True
            self._messages.put((count, str(device)))

    def submit(self, answers: queue.SimpleQueue[Any], job: Job, settings: Settings) -> int:
        """Its number. `answers` gets (number, artifact or what went wrong, seconds)."""
        number = next(self._numbers)
        self._waiting[number] = answers
        self._messages.put((number, vars(settings), vars(job)))
        return number

    def end(self) -> None:
        """With its children, whatever they are doing."""
        if self.alive:  # else they ended with it, and its number may be another's
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        self._messages.put(None)
        self._reader.join(_GONE)  # it reads until no child is left, so that what they held of the GPU is free

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            while (message := self._messages.get()) is not None:
                worker.send(stream, message)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError), self._process.stdout as stream:
            while True:
                number, made, seconds = worker.receive(stream)
                self._waiting.pop(number).put((number, made, seconds))
        shutil.rmtree(self._folder, ignore_errors=True)  # none of them is left that could write there


class WorkerPool:
    """Processes that compile: one that may be started ahead of need and imports torch, and its children."""

    def __init__(self) -> None:
        self._crew: _WorkerProcess | None = None
        self._wanted: tuple[int, torch.device] | None = None
        self._users = 0
        self._end: threading.Timer | None = None
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._crew is not None and self._crew.alive

    def start(self) -> None:
        """Import torch, for whoever asks within STAY seconds."""
        with self._lock:
            if not self.running:
                self.close()  # one that ended by itself has its threads and pipes yet
                self._crew = _WorkerProcess()
            self._end_later()

    def call_up(self, count: int, device: torch.device) -> None:
        """Jobs come soon: have `count` children, or as many as there are already."""
        with self._lock:
            self._wanted = (count, device)
            self.start()
            assert self._crew is not None
            self._crew.call_up(count, device)

    def answers(self, jobs: Iterable[tuple[int, Job]], settings: Settings) -> Generator[Answer | None]:
        """(number, artifact or what went wrong, seconds) of each job as they come; None now and then between.

        Whoever does not take all of them ends the processes. Raises RuntimeError where they end by themselves.
        """
        with self._lock:
            assert self._wanted is not None, "somebody called them up"
            self.call_up(*self._wanted)  # again, where it took so long that they ended
            crew = self._crew
            assert crew is not None
            self._users += 1
        try:
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            waiting = {crew.submit(answers, job, settings): number for number, job in jobs}
            while waiting:
                try:
                    submitted, made, seconds = answers.get(timeout=_POLL)
                except queue.Empty:
                    if not crew.alive and answers.empty():
                        raise RuntimeError("the processes that compile ended") from None
                    yield None
                    continue
                yield waiting.pop(submitted), made if isinstance(made, str) else Artifact(**made), seconds
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._end_later()

    def close(self) -> None:
        """End the processes. They are started again where they are wanted again."""
        with self._lock:
            crew, self._crew = self._crew, None
            if self._end is not None:
                self._end.cancel()
        if crew is not None:
            crew.end()

    def _end_later(self) -> None:
        if self._end is not None:
            self._end.cancel()
        if self._crew is None:
            return
        self._end = threading.Timer(STAY, self._end_unused)
        self._end.daemon = True
        self._end.start()

    def _end_unused(self) -> None:
        with self._lock:
            if not self._users:
                self.close()
