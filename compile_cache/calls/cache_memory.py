"""The memory of a process's captures: who holds how much of it, and what gives it back."""

from __future__ import annotations

import threading
from typing import Any

from ..captures.attempts import CaptureAttempts
from ..captures.captures import Captures, Entry, Reach
from ..choices.whole_calls import WholeCalls
from ..config import CacheConfig
from ..keys import CaptureKey, Tier
from ..stats import Stats
from ..store.shape_history import ShapeHistory
from .reasons import SeenSignatures


class CacheMemory:
    """The part of GraphCache that the application asks for memory, and tells of sampling runs and modules."""

    def __init__(self, config: CacheConfig, reach: Reach) -> None:
        """reach: see `CaptureAttempts`."""
        self.config = config
        self.stats = Stats()
        self._captures = Captures(config.budget_bytes)
        self.bytes_by_device = self._captures.held_by_device
        self._seen = SeenSignatures()
        folder = self._folder = config.store_folder
        self.shapes = ShapeHistory(folder / "shapes" if folder and config.remember else None, config.application)
        self._attempts = CaptureAttempts(self._captures, self.stats, config, reach)
        self.whole_calls = WholeCalls(self.stats, folder and folder / "calls", f"{config.source} {config.application}")
        self._lock = threading.RLock()

    def open_session(self, owner: int) -> None:
        """A sampling run of a module starts: the captures that it uses stay until it ends."""
        with self._lock:
            self._captures.open_session(owner)

    def close_session(self, owner: int) -> None:
        """The sampling run is over. If captures hold more than the budget now, release what they only work in."""
        with self._lock:
            self._captures.close_session(owner)
            self._captures.keep_to_budget()

    def captures_of(self, owner: int) -> int:
        """How many captures a module has."""
        return sum(key.owner == owner for key, _ in self._captures)

    def gain_of_originals(self, owner: int) -> float | None:
        """How many times as fast captures make a module's originals, as far as it is known."""
        found = [entry.gain for key, entry in self._captures if key.owner == owner and key.tier is Tier.ORIGINAL]
        return max((gain for gain in found if gain), default=None)

    @property
    def bytes(self) -> int:  # that captures hold
        return self._captures.held_bytes

    def give_back(self, everything: bool) -> int:
        """The application needs memory, with `everything` because it unloads all models. See `Captures.give_back`."""
        with self._lock:
            freed = self._captures.give_back(everything)
            if everything:
                self._attempts.memory_was_freed()
            self.stats.counters.evictions = self._captures.evictions
            return freed

    def trim(self, bytes_to_free: int | None = None) -> int:
        """Free captures that no session uses, oldest first; all of them by default. Returns the bytes freed."""
        with self._lock:
            freed = self._captures.free(bytes_to_free)
            self._attempts.retry_all(measured=bytes_to_free is None)
            self.stats.counters.evictions = self._captures.evictions
            return freed

    def forget(self, owner: int) -> None:
        """Drop everything of a module that was garbage collected, and give its memory back."""
        with self._lock:
            self._seen.forget(owner)
            had = self.captures_of(owner)
            self._captures.forget(owner)
            self._attempts.forget(owner)
            self.whole_calls.forget(owner)
            if had:
                self._captures.released()
                self._attempts.memory_was_freed()

    def drop_stale(self, owner: int, epoch: int) -> None:
        """Drop a module's captures from before its weights epoch `epoch`."""
        with self._lock:
            self._captures.drop_stale(owner, epoch)

    def captured(self) -> list[tuple[CaptureKey, Entry]]:
        """Every capture that there is now, the least recently used first."""
        return list(self._captures)

    def report(self) -> dict[str, Any]:
        """Plain data for `GET /resolute/cache` and the report node. Never waits for a call that is running."""
        return {"counters": self.stats.snapshot(), **self._captures.report(self.shapes.size_of)}
