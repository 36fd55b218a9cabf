"""The workers, while there is work for them: a few beside a model that samples, or many for a call that waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .pool import WorkerPool, worker_count_behind

_PAUSE_SECONDS = 60.0  # after a lack of memory has ended the workers


class HeldWorkers:
    """Workers for one device at a time. Not thread-safe.

    device: of those that are held. count: of them, or before that as planned.
    """

    def __init__(self, pool: WorkerPool, clock: Callable[[], float]) -> None:
        self._pool, self._clock = pool, clock
        self._planned = 0
        self._held = contextlib.ExitStack()
        self._paused_until = 0.0
        self.device: torch.device | None = None
        self.count = 1

    @property
    def are_paused(self) -> bool:
        return self._clock() < self._paused_until

    def plan(self, wanted: int | None, anew: bool = False) -> bool:
        """Find how many there may be beside a model that samples, unless that is known. Returns False if none may."""
        if anew or not self._planned:
            self._planned = worker_count_behind(wanted)
        if self.device is None:
            self.count = max(self._planned, 1)
        return self._planned > 0

    def may_serve(self, device: torch.device) -> bool:
        """They are held for the device, or could be now."""
        return self.device in (None, device)

    def hold(self, device: torch.device) -> None:
        """Start them, unless they are held. Raises OSError."""
        if self.device is None:
            self._begin(self._planned, device, low=True)

    def hold_for(self, count: int, device: torch.device) -> None:
        """Start so many for a call that waits, at usual priority. Raises OSError."""
        self._begin(count, device)

    def _begin(self, count: int, device: torch.device, low: bool = False) -> None:
        self._held.enter_context(self._pool.in_use(count, device, low))
        self.device, self.count = device, count

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
