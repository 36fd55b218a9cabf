"""Compile many regions at once, in processes of their own: lowering is Python, and uses one processor each."""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...artifact_store import Artifact
from . import worker
from .job import Job, Settings

logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds between two looks at whether somebody cancels


class Workers:
    """Started at once, so that they import torch while the first traces are made. Use as a context."""

    def __init__(self, count: int, settings: Settings) -> None:
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Artifact | str, float]] = queue.SimpleQueue()
        self._settings = vars(settings)
        self._why = ""  # the last process ended
        self._processes = [self._started() for _ in range(count)]
        self._threads = [threading.Thread(target=self._serve, args=(each,), daemon=True) for each in self._processes]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        """Ends them, whatever they are doing."""
        self.close_queue()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def submit(self, number: int, job: Job) -> None:
        self._jobs.put((number, job))

    def answers(self, count: int) -> Iterator[tuple[int, Artifact | str, float] | None]:
        """(number, artifact or what went wrong, seconds) of `count` jobs as they come; None now and then between.

        Raises RuntimeError where no worker is left.
        """
        while count:
            try:
                answer = self._answers.get(timeout=_POLL)
            except queue.Empty:
                if not any(thread.is_alive() for thread in self._threads) and self._answers.empty():
                    raise RuntimeError(f"the processes that compile ended ({self._why})") from None
                yield None
                continue
            count -= 1
            yield answer

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        path = str(Path(worker.__file__).resolve())
        return subprocess.Popen([sys.executable, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread for each process: hand it one job after the other. It ends with the process."""
        assert process.stdin is not None
        assert process.stdout is not None
        number = None
        try:
            worker.send(process.stdin, self._settings)
            while (entry := self._jobs.get()) is not None:
                number, job = entry
                worker.send(process.stdin, vars(job))
                made, seconds = worker.receive(process.stdout)
                self._answers.put((number, made if isinstance(made, str) else Artifact(**made), seconds))
                number = None
        except Exception as error:  # whatever it is, somebody waits for an answer
            logger.debug("Resolute: a process that compiles ended", exc_info=True)
            self._why = f"{type(error).__name__}: {error}"
            if number is not None:
                self._answers.put((number, f"the worker ended ({self._why})", 0.0))

    def close_queue(self) -> None:
        """No more jobs come."""
        for _ in self._threads:
            self._jobs.put(None)


def all_of(workers: Workers, jobs: Iterable[tuple[int, Job]]) -> int:
    """Submit jobs while they are made. Returns how many there were."""
    count = 0
    for number, job in jobs:
        workers.submit(number, job)
        count += 1
    workers.close_queue()
    return count
