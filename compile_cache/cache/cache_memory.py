"""The memory of a process's captures: how much each module's captures occupy, and the calls that free it."""

from __future__ import annotations

import threading
from typing import Any

from ..config import CacheConfig
from ..keys import CaptureKey, Tier
from ..store.shape_history import ShapeHistory
from ..telemetry.reasons import SeenSignatures
from ..telemetry.stats import Stats
from ..tuning.compiled_vs_eager import CompiledVsEager
from .capture_policy import CapturePolicy
from .captures import Captures, Entry, Reach


class CacheMemory:
    """The part of GraphCache that frees memory for the application and tracks its sampling runs and modules."""

    def __init__(self, config: CacheConfig, reach: Reach) -> None:
        """reach: see `CapturePolicy`."""
        self.config = config
        self.stats = Stats()
        self._captures = Captures(config.budget_bytes)
        self.bytes_by_device = self._captures.held_by_device
        self._seen = SeenSignatures()
        folder = self._folder = config.store_folder
        self.shapes = ShapeHistory(folder / "shapes" if folder and config.remember else None, config.application)
        self._capture_policy = CapturePolicy(self._captures, self.stats, config, reach)
        code = f"{config.source} {config.application}"
        self.compiled_vs_eager = CompiledVsEager(self.stats, folder and folder / "calls", code)
        self._lock = threading.RLock()

    def open_session(self, owner: int) -> None:
        """Start a sampling run of a module: the captures that it uses are pinned until it ends."""
        with self._lock:
            self._captures.open_session(owner)

    def close_session(self, owner: int) -> None:
        """End the sampling run. If captures exceed the budget now, release their workspace."""
        with self._lock:
            self._captures.close_session(owner)
            self._captures.keep_to_budget()

    def captures_of(self, owner: int) -> int:
        """Return the number of a module's captures."""
        return sum(key.owner == owner for key, _ in self._captures)

    def gain_of_originals(self, owner: int) -> float | None:
        """Return the largest known speed-up of a module's originals by a capture; None if none is known."""
        found = [entry.gain for key, entry in self._captures if key.owner == owner and key.tier is Tier.ORIGINAL]
        return max((gain for gain in found if gain), default=None)

    @property
    def bytes(self) -> int:  # that captures occupy
        return self._captures.held_bytes

    def give_back(self, everything: bool) -> int:
        """Free memory for the application; `everything`: it unloads all models. See `Captures.give_back`."""
        with self._lock:
            freed = self._captures.give_back(everything)
            if everything:
                self._capture_policy.memory_was_freed()
            self.stats.counters.evictions = self._captures.evictions
            return freed

    def trim(self, bytes_to_free: int | None = None) -> int:
        """Free captures that no session uses, oldest first; all of them by default. Returns the bytes freed."""
        with self._lock:
            freed = self._captures.free(bytes_to_free)
            self._capture_policy.retry_all(measured=bytes_to_free is None)
            self.stats.counters.evictions = self._captures.evictions
            return freed

    def forget(self, owner: int) -> None:
        """Drop all data of a module that was garbage collected, and release its memory."""
        with self._lock:
            self._seen.forget(owner)
            had = self.captures_of(owner)
            self._captures.forget(owner)
            self._capture_policy.forget(owner)
            self.compiled_vs_eager.forget(owner)
            if had:
                self._captures.released()
                self._capture_policy.memory_was_freed()

    def drop_stale(self, owner: int, epoch: int) -> None:
        """Drop a module's captures of weights epochs other than `epoch`."""
        with self._lock:
            self._captures.drop_stale(owner, epoch)

    def captured(self) -> list[tuple[CaptureKey, Entry]]:
        """Return every current capture, the least recently used first."""
        return list(self._captures)

    def report(self) -> dict[str, Any]:
        """Return plain data for `GET /resolute/cache` and the report node. Never waits for a running call."""
        return {"counters": self.stats.snapshot(), **self._captures.report(self.shapes.size_of)}
