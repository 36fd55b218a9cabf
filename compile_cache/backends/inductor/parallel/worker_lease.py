"""The workers, while there is work for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .job import Job
from .pool import WorkerPool, worker_count
from .process import Compiled

_LEAST = 4  # of them are started, if so many may be
_PAUSE_SECONDS = 60.0  # after a lack of memory has ended the workers


class WorkerLease:
    """Workers for one device at a time. Not thread-safe.

    device: of those that are held. count: of them, or before that as planned; 0: this process compiles.
    """

    def __init__(self, pool: WorkerPool, clock: Callable[[], float]) -> None:
        self._pool, self._clock = pool, clock
        self._held = contextlib.ExitStack()
        self._paused_until = 0.0
        self.device: torch.device | None = None
        self.count = 1

    @property
    def are_paused(self) -> bool:
        return self._clock() < self._paused_until

    @property
    def are_running(self) -> bool:
        return self._pool.running

    def plan(self, wanted: int | None) -> int:
        """Find how many there may be, unless they are held. wanted: see `CacheConfig.workers`."""
        if self.device is None:
            self.count = worker_count(wanted)
        return self.count

    def may_serve(self, device: torch.device) -> bool:
        """They are held for the device, or could be now."""
        return self.device in (None, device) and not self.are_paused

    def hold(self, device: torch.device, most: int) -> None:
        """Start them, unless they are held, but no more than `most`. Raises OSError."""
        if self.device is None:
            self.count = max(min(self.count, max(most, _LEAST)), 1)  # more may be left soon
            self._held.enter_context(self._pool.in_use(self.count, device))
            self.device = device

    def submit(self, job: Job) -> Compiled:
        return self._pool.submit(job)

    def let_go(self, at_once: bool = False) -> None:
        """They end when they were idle for a while, or at once."""
        self._held.close()
        if at_once:
            self._pool.close()
        self.device = None

    def pause(self) -> None:
        """Memory is short: let go, and hold none for a while."""
        self.let_go()
        self._paused_until = self._clock() + _PAUSE_SECONDS
