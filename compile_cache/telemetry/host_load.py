"""How much of the host's time calls leave to background work. One thread works; calls of any thread take precedence.

Python runs one thread at a time, so work during a host-bound call slows that call down. A replay is one launch, and a
call that keeps the GPU busy leaves the rest of the host's time to the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_HOST_BOUND = 0.08  # share of the time during host-bound calls, which become that much slower
_REPLAYS = 0.8  # share during replays: the sampler's code between them needs the rest
_BETWEEN = 0.2  # share while a prompt does something else, such as loading a model or writing a picture
_RECENT = 0.3  # seconds without a call, after which the prompt counts as doing something else
_PATIENCE = 0.2  # seconds that a call waits for the work to pause; work that cannot pause continues beside it
_LEAST_SLEEP, _MOST_SLEEP = 0.002, 0.05


class HostLoad:
    """Calls report the host time that they leave; the working thread checks it between small parts of its work."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self.prompt_runs: Callable[[], bool] = lambda: False
        self._spare, self._latest = 1.0, 0.0
        self._claims = self._waiting = 0
        self._lock = threading.Lock()
        self._unclaimed, self._paused = threading.Event(), threading.Event()
        self._unclaimed.set()
        self._paused.set()
        self._since = self._owed = 0.0

    # --- calls -----------------------------------------------------------------------------------------------------

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, a call has the host to itself: it is timed, or captured, or runs only once."""
        with self._lock:
            self._claims += 1
            self._unclaimed.clear()
        self._paused.wait(_PATIENCE)
        try:
            yield
        finally:
            with self._lock:
                self._claims -= 1
                if not self._claims:
                    self._unclaimed.set()
            self._latest = self._clock()

    @contextmanager
    def claims_suspended(self) -> Iterator[None]:
        """Inside, a call waits for the work, so its claims are suspended."""
        with self._lock:
            claims, self._claims = self._claims, 0
            self._waiting += 1
            self._unclaimed.set()
        try:
            yield
        finally:
            with self._lock:
                self._claims += claims
                self._waiting -= 1
                if self._claims:
                    self._unclaimed.clear()
            if claims:
                self._paused.wait(_PATIENCE)

    def record_call(self, host_share: float | None) -> None:
        """Record an answered call. host_share: the share of its time that kept the host busy; None: all of it."""
        self._spare = _HOST_BOUND if host_share is None else min(max(1.0 - host_share, _HOST_BOUND), _REPLAYS)
        self._latest = self._clock()

    # --- the thread that works -------------------------------------------------------------------------------------

    @property
    def spare(self) -> float:
        """The share of the time that background work may take now."""
        if self._waiting or not self.prompt_runs():
            return 1.0
        return self._spare if self._clock() - self._latest < _RECENT else _BETWEEN

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the caller works in the background and calls `rest` between the parts of its work."""
        self._begin()
        try:
            yield
        finally:
            self._paused.set()

    def _begin(self) -> None:
        """Wait until no call claims the host. A call that claims it at that moment sees that the work is running."""
        while True:
            self._paused.clear()
            if self._unclaimed.is_set():
                break
            self._paused.set()
            self._unclaimed.wait()
        self._since, self._owed = self._clock(), 0.0

    def rest(self) -> None:
        """Pause while a call claims the host, and sleep often enough to keep the work within its share of the time."""
        if not self._unclaimed.is_set():
            self._begin()
            return
        now, spare = self._clock(), self.spare
        self._owed += (now - self._since) * (1.0 / spare - 1.0)
        if self._owed >= _LEAST_SLEEP:
            self._sleep(min(self._owed, _MOST_SLEEP))
            self._owed = max(self._owed - _MOST_SLEEP, 0.0)
        self._since = self._clock()
