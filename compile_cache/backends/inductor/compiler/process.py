"""One process that runs worker.py, with its pending jobs, our threads for it and its temporary folder."""

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
from .failures import HungError, KilledError, NeedsGpuError, NotCompiledError, OtherEnvironmentError

if TYPE_CHECKING:  # job imports inductor, and the pool starts processes before inductor is imported
    from .job import Job

logger = logging.getLogger(__name__)

Compiled = Future[tuple[Artifact, float]]  # the artifact, and the seconds that its compile took

IDLE_SECONDS = 60.0  # idle processes stay alive this long, because a workflow's next model soon needs them
_LOOK_SECONDS = 0.5  # between two checks for idle or hung processes
_KILL_SECONDS = 5.0  # the most time that a killed process may take to end


def _creation_flags() -> int:
    """On Windows: low priority, and no console, which would open a window beside ComfyUI Desktop."""
    if sys.platform != "win32":
        return 0
    return subprocess.CREATE_NO_WINDOW | subprocess.BELOW_NORMAL_PRIORITY_CLASS


def _error_of(answer: str) -> NotCompiledError:
    """Convert a worker's error text to the job's exception."""
    if answer in (worker.ENDED, worker.HUNG):
        return KilledError(answer) if answer == worker.ENDED else HungError(answer)
    kinds = {each.__name__: each for each in (OtherEnvironmentError, NeedsGpuError)}
    return kinds.get(answer.partition(":")[0], NotCompiledError)(answer)


class WorkerProcess:
    """A process that runs worker.py, its children, and three threads of ours: one writes to it, one reads from it, and
    one ends it when it is idle or hangs.

    users: the number of users that may submit more jobs; the process is not idle while there are any.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._folder = TemporaryFolder()
        command = [sys.executable, str(Path(worker.__file__).resolve()), str(self._folder.path)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                creationflags=_creation_flags(),
            )
        except OSError:
            self._folder.remove()
            raise
        self.users = 0
        self._pending: dict[int, Compiled] = {}
        self._numbers = itertools.count()
        self._heard = time.monotonic()  # when it last received a job or sent a result
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.device: torch.device | None = None  # the device that its children compile for
        self._error: NotCompiledError | None = None  # raised by its jobs, once it ends
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        for work in (self._write, self._watch):
            threading.Thread(target=work, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._error is None and self._process.poll() is None

    @property
    def is_busy(self) -> bool:
        return self.alive and bool(self.users or self._pending)

    def start_children(self, count: int, device: torch.device) -> None:
        """Start `count` children that compile for a device. Only the first call has an effect."""
        self._heard = time.monotonic()
        if self.device is None:
            self.device = device
            self._messages.put((count, device.type))

    def submit(self, job: Job) -> Compiled:
        """Submit a job. The future raises NotCompiledError if the job fails or the process ends."""
        number, future = next(self._numbers), Compiled()
        self._heard = time.monotonic()
        self._pending[number] = future
        self._messages.put((number, vars(job)))
        if self._error is not None:  # the process may have ended before this job was pending
            self._fail(self._error)
        return future

    def end(self, error: NotCompiledError | None = None) -> None:
        """Kill the process and its children. Pending jobs raise `error`."""
        self._fail(error or NotCompiledError("the processes that compile were ended"))
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._reader.join(_KILL_SECONDS)  # the pipe closes with the last child

    def _fail(self, error: NotCompiledError) -> None:
        self._error = self._error or error
        self._messages.put(None)
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread removed the last job
                self._pending.popitem()[1].set_exception(self._error)

    def _kill(self) -> None:
        if self._process.poll() is not None:  # its process id may belong to another process by now
            return
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self._process.kill()  # its children exit when it ends
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        used, worked = self._heard, 0.0
        while self._error is None:
            now = time.monotonic()
            used = now if self.is_busy else max(used, self._heard)
            if self._pending and now - self._heard > worker.SILENT_SECONDS:  # the program itself ends a hung child
                before, worked, self._heard = worked, worker.processor_seconds(self._process.pid), now
                if worked == before:
                    self.end(NotCompiledError("the processes that compile hung, and were ended"))
            elif now - used > IDLE_SECONDS:
                self.end()
            time.sleep(_LOOK_SECONDS)

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
                    artifact = None if isinstance(made, str) else Artifact(**made)
                    future = self._pending.pop(number)
                    self._heard = time.monotonic()
                    if artifact is None:
                        future.set_exception(_error_of(made))
                    else:
                        future.set_result((artifact, seconds))
        except EOFError:  # all processes that write to the pipe have ended
            why = "the processes that compile ended"
        except Exception as error:  # noqa: BLE001 (unpickling malformed data raises any class)
            why = f"the processes that compile answered nonsense, and were ended: {first_line(error)}"
        if self._pending:
            logger.warning("Resolute: %s. What they had is compiled when a call comes to it", why)
        self._kill()
        self._fail(NotCompiledError(why))
        self._folder.remove()
