"""Compile many regions at once, in processes of their own: lowering is Python, and uses one processor each."""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...artifact_store import Artifact
from . import worker

if TYPE_CHECKING:  # which imports inductor, and processes are started before that
    from .job import Job, Settings

logger = logging.getLogger(__name__)

STAY = 60.0  # seconds after the last job: the next model of a workflow comes soon
_POLL = 0.1  # seconds between two looks at whether somebody cancels

Answer = tuple[int, "Artifact | str", float]


@dataclass(frozen=True, eq=False)
class _Task:
    number: int
    job: Job
    settings: Settings
    answers: queue.SimpleQueue[Answer]


class Workers:
    """Processes that compile. They may be started ahead of need, so that they have imported torch when it comes."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._users = 0
        self._why = ""  # the last process ended
        self._end: threading.Timer | None = None
        self._lock = threading.RLock()

    def start(self, count: int, device: torch.device) -> None:
        """Have `count` processes, for whoever asks within STAY seconds."""
        with self._lock:
            self._processes = [process for process in self._processes if process.poll() is None]
            for _ in range(count - len(self._processes)):
                command = [sys.executable, str(Path(worker.__file__).resolve()), str(device)]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._processes.append(process)
                threading.Thread(target=self._serve, args=(process, self._tasks), daemon=True).start()
            self._end_later()

    def answers(self, jobs: Iterable[tuple[int, Job]], settings: Settings) -> Generator[Answer | None]:
        """(number, artifact or what went wrong, seconds) of each job as they come; None now and then between.

        Whoever does not take all of them ends the processes. Raises RuntimeError where none is left.
        """
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        with self._lock:
            self._users += 1
        try:
            waiting = 0
            for number, job in jobs:
                self._tasks.put(_Task(number, job, settings, answers))
                waiting += 1
            while waiting:
                try:
                    answer = answers.get(timeout=_POLL)
                except queue.Empty:
                    if all(process.poll() is not None for process in self._processes) and answers.empty():
                        raise RuntimeError(f"the processes that compile ended ({self._why})") from None
                    yield None
                    continue
                waiting -= 1
                yield answer
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._end_later()

    def close(self) -> None:
        """End the processes, whatever they are doing. They are started again where they are wanted again."""
        with self._lock:
            processes, self._processes = self._processes, []
            for _ in processes:
                self._tasks.put(None)
            self._tasks = queue.SimpleQueue()
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _end_later(self) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = threading.Timer(STAY, self._end_unused)
        self._end.daemon = True
        self._end.start()

    def _end_unused(self) -> None:
        with self._lock:
            if not self._users:
                self.close()

    def _serve(self, process: subprocess.Popen[bytes], tasks: queue.SimpleQueue[_Task | None]) -> None:
        """In a thread for each process: hand it one job after the other. It ends with the process."""
        assert process.stdin is not None
        assert process.stdout is not None
        told: Settings | None = None
        task: _Task | None = None
        try:
            while (task := tasks.get()) is not None:
                if task.settings != told:
                    told = task.settings
                    worker.send(process.stdin, {"settings": vars(told)})
                worker.send(process.stdin, {"job": vars(task.job)})
                made, seconds = worker.receive(process.stdout)
                task.answers.put((task.number, made if isinstance(made, str) else Artifact(**made), seconds))
        except Exception as error:  # whatever it is, somebody waits for an answer
            logger.debug("Resolute: a process that compiles ended", exc_info=True)
            self._why = f"{type(error).__name__}: {error}"
            process.kill()
            if task is not None:
                task.answers.put((task.number, f"the worker ended ({self._why})", 0.0))
