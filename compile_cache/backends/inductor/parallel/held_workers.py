"""The workers, while there is work for them: a few beside a model that samples, or many for a call that waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from .pool import WorkerPool, fits_while_idle, worker_count_behind

_PAUSE_SECONDS = 60.0  # after a lack of memory has ended the workers
_PATIENCE_SECONDS = 10.0  # without memory for a single one


class HeldWorkers:
    """Workers for one device at a time. Not thread-safe.

    device: of those that are held. count: of them, or before that as planned. only_idle: they have no room beside a
    model that samples, so they go when a prompt begins.
    """

    def __init__(self, pool: WorkerPool, clock: Callable[[], float]) -> None:
        self._pool, self._clock = pool, clock
        self._counts: dict[torch.device, tuple[int, bool]] = {}  # see `worker_count_behind`
        self._lacking: dict[torch.device, float] = {}  # since when there is no memory for one
        self._held = contextlib.ExitStack()
        self._paused_until = 0.0
        self.device: torch.device | None = None
        self.only_idle, self.count = False, 1

    @property
    def are_paused(self) -> bool:
        return self._clock() < self._paused_until

    def plan(self, wanted: int | None, device: torch.device, anew: bool = False) -> bool:
        """Find how many a device may have, unless that is known. Returns False if there is no processor for any."""
        if anew or not self._counts.get(device, (0, False))[0]:
            self._counts[device] = worker_count_behind(wanted, device)
        count = self._counts[device][0]
        if self.device is None:
            self.count = max(count, 1)
        return count > 0

    def lacks_room(self, device: torch.device) -> bool:
        """For a while there was no memory for one, though no prompt ran: then calls wait, and weights give it."""
        return self._clock() - self._lacking.get(device, math.inf) > _PATIENCE_SECONDS

    def may_serve(self, device: torch.device, is_idle: bool) -> bool:
        """They are held for the device, or could be now. is_idle: no prompt runs."""
        if self.device is not None or self.are_paused:
            return self.device == device
        if not self._counts[device][1]:
            return True
        if not is_idle:
            return False
        if not (fits := fits_while_idle(device)):
            self._lacking.setdefault(device, self._clock())
        return fits

    def hold(self, device: torch.device) -> None:
        """Start them, unless they are held. Raises OSError."""
        if self.device is None:
            count, only_idle = self._counts[device]
            self._begin(count, device, only_idle, low=True)

    def hold_for(self, count: int, device: torch.device, has_room: bool) -> None:
        """Start so many for a call that waits, at usual priority. has_room: see `WorkerPool.in_use`. Raises OSError."""
        self._begin(count, device, only_idle=False, has_room=has_room)

    def _begin(self, count: int, device: torch.device, only_idle: bool, **given: bool) -> None:
        self._held.enter_context(self._pool.in_use(count, device, **given))
        self.device, self.only_idle, self.count = device, only_idle, count
        self._lacking.pop(device, None)

    def let_go(self, at_once: bool = False) -> None:
        """They end when they were idle for a while; at once where they have no room beside a model that samples."""
        self._held.close()
        if self.only_idle or at_once:
            self._pool.close()
        self.device, self.only_idle = None, False

    def pause(self) -> None:
        """Memory is short: let go, and hold none for a while."""
        self.let_go()
        self._paused_until = self._clock() + _PAUSE_SECONDS
