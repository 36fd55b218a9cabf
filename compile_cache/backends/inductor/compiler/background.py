"""The background thread that works on the queue, beside calls and while no prompt runs."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from ....torch_compat.private_names import yielding_gil
from ..lower.tracing import import_all
from .compile_queue import CompileQueue

_IDLE_SECONDS = 2.0  # without a prompt, after which this process also compiles what no worker can
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0  # the most time that the thread may take to end


class BackgroundCompiler:
    """Starts the thread when a call queues a region; the thread ends when no region is left."""

    def __init__(self, queue: CompileQueue, clock: Callable[[], float] = time.monotonic) -> None:
        self.queue, self._clock = queue, clock
        queue.on_left = self._begin
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._idle_since = 0.0
        atexit.register(self.end)

    def compile_eta(self, more: int) -> tuple[int, float | None]:
        """See `Backend.compile_eta`. Any thread may call it."""
        queue = self.queue
        with queue.lock:
            waiting = [task.call.region.label for task in queue.waiting.values()] + [""] * more
        return queue.left, queue.eta.seconds(waiting, queue.lease.count, queue.stats.host.spare, queue.clock())

    def _begin(self) -> None:
        with self.queue.lock:
            if self._thread is None:
                self._idle_since = self._clock()
                self._thread = threading.Thread(target=self._live, name="resolute-compile", daemon=True)
                self._thread.start()

    def _live(self) -> None:
        has_worked, has_imported = False, False
        with yielding_gil():  # yield to the calls of other threads
            while not self._ending.wait(0 if has_worked else _LOOK_SECONDS):
                host = self.queue.stats.host
                if not has_imported:
                    import_all()
                    has_imported = True
                with host.working():
                    if host.prompt_runs():
                        self._idle_since = self._clock()
                    is_idle = self._clock() - self._idle_since >= _IDLE_SECONDS
                    has_worked = self.queue.work.step(compile_local=is_idle, yield_point=host.rest)
                with self.queue.lock:
                    if not self.queue.left:
                        self._thread = None
                        return

    def end(self) -> None:
        """Stop the thread and the workers at exit: a trace would crash in the interpreter's shutdown."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(_END_SECONDS)
        self.queue.lease.release(at_once=True)
