"""How much of the host's time calls leave to work beside them. One thread works; calls of any thread go before it.

Python runs one thread at a time, so work beside a call that keeps the host busy makes that call longer. A replay is one
launch, and a call that keeps the GPU busy leaves the host the rest of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_HOST_BOUND = 0.08  # of the time beside calls that keep the host busy: they take so much longer
_REPLAYS = 0.8  # beside replays: what samples between them takes the rest
_BETWEEN = 0.2  # of the time while a prompt does something else, such as loading a model or writing a picture
_RECENT = 0.3  # seconds without a call, after which a prompt does something else
_PATIENCE = 0.2  # seconds that a call waits for the work to pause; what cannot pause goes on beside it
_LEAST_SLEEP, _MOST_SLEEP = 0.002, 0.05


class HostLoad:
    """Calls say what they leave; the thread that works asks between two small parts of its work."""

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
        """The host is a call's alone meanwhile: it is measured, or captured, or runs once."""
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
    def released(self) -> Iterator[None]:
        """A call waits for the work meanwhile, and so claims nothing."""
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

    def answered(self, host_share: float | None) -> None:
        """A call was answered. host_share: of its time the host was busy for so much; None: for all of it."""
        self._spare = _HOST_BOUND if host_share is None else min(max(1.0 - host_share, _HOST_BOUND), _REPLAYS)
        self._latest = self._clock()

    # --- the thread that works -------------------------------------------------------------------------------------

    @property
    def spare(self) -> float:
        """The share of the time that work may take now."""
        if self._waiting or not self.prompt_runs():
            return 1.0
        return self._spare if self._clock() - self._latest < _RECENT else _BETWEEN

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work goes on meanwhile, with `rest` between its parts."""
        self._begin()
        try:
            yield
        finally:
            self._paused.set()

    def _begin(self) -> None:
        """Go on as soon as no call claims the host. A call that claims it at this moment sees that work goes on."""
        while True:
            self._paused.clear()
            if self._unclaimed.is_set():
                break
            self._paused.set()
            self._unclaimed.wait()
        self._since, self._owed = self._clock(), 0.0

    def rest(self) -> None:
        """Pause while a call claims the host, and so often that the work keeps its share of the time."""
        if not self._unclaimed.is_set():
            self._begin()
            return
        now, spare = self._clock(), self.spare
        self._owed += (now - self._since) * (1.0 / spare - 1.0)
        if self._owed >= _LEAST_SLEEP:
            self._sleep(min(self._owed, _MOST_SLEEP))
            self._owed = max(self._owed - _MOST_SLEEP, 0.0)
        self._since = self._clock()
