"""The lease that keeps workers alive while there is work for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .job import Job
from .pool import WorkerPool, worker_count
from .process import Compiled

_LEAST = 4  # workers to start even for fewer regions, if the plan allows so many
_PAUSE_SECONDS = 60.0  # without workers, after they ended for lack of memory


class WorkerLease:
    """Leases workers for one device at a time. Not thread-safe.

    device: the device of the lease, if any. count: workers leased, or planned before; 0: this process compiles.
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
        """Plan the number of workers, unless some are leased, and return it. wanted: see `CacheConfig.workers`."""
        if self.device is None:
            self.count = worker_count(wanted)
        return self.count

    def may_serve(self, device: torch.device) -> bool:
        """True if workers are leased for the device, or can be leased now."""
        return self.device in (None, device) and not self.are_paused

    def acquire(self, device: torch.device, most: int) -> None:
        """Lease workers for `most` regions, unless some are leased, and start them. Raises OSError."""
        if self.device is None:
            self.count = max(min(self.count, max(most, _LEAST)), 1)  # calls may queue more regions soon
            self._held.enter_context(self._pool.in_use(self.count, device))
            self.device = device

    def submit(self, job: Job) -> Compiled:
        return self._pool.submit(job)

    def release(self, at_once: bool = False) -> None:
        """Release the workers: they end after their idle timeout, or at once."""
        self._held.close()
        if at_once:
            self._pool.close()
        self.device = None

    def pause(self) -> None:
        """Memory is short: release the workers, and lease none for a while."""
        self.release()
        self._paused_until = self._clock() + _PAUSE_SECONDS
