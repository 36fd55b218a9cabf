"""A least-recently-used cache, bounded by bytes, with entries that can be pinned."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class Entry(Generic[V]):
    value: V
    bytes: int
    hits: int = 0
    pins: int = 0


class ByteLRU(Generic[K, V]):
    """budget: in bytes. on_evict: called once for each value that leaves, for whatever cause.

    Thread-safe, with a lock of its own that is never held for long, because a report must not wait for a forward.
    """

    def __init__(self, budget: int, on_evict: Callable[[V], None] | None = None) -> None:
        self.budget = budget
        self.evictions = 0
        self._on_evict = on_evict
        self._entries: OrderedDict[K, Entry[V]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[tuple[K, Entry[V]]]:
        with self._lock:
            return iter(list(self._entries.items()))

    @property
    def bytes(self) -> int:
        total = sum(entry.bytes for _, entry in self)
        return total + self.shared_bytes() if len(self) else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned entries, without what entries share."""
        with self._lock:
            return sum(entry.bytes for entry in self._entries.values() if entry.pins)

    def shared_bytes(self) -> int:
        """Bytes that all entries hold together. Evicting one entry frees none of them."""
        return 0

    def get(self, key: K) -> V | None:
        """The value, counted as a hit and now the most recently used, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.hits += 1
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: K, value: V, size: int) -> bool:
        """Keep `value` of `size` bytes; others are evicted. Returns False if it does not fit beside the pinned ones."""
        with self._lock:
            self.discard(key)
            if self.pinned_bytes + size > self.budget:
                return False
            self.trim(self.budget - size + self.shared_bytes())  # evicting one frees nothing of what they share
            self._entries[key] = Entry(value, size)
            return True

    def trim(self, limit: int) -> int:
        """Evict unpinned entries, oldest first, down to `limit` bytes. Returns the bytes freed."""
        with self._lock:
            before = self.bytes
            left = before
            for key, entry in self:
                if left <= limit:
                    break
                if not entry.pins:
                    left -= entry.bytes
                    self.evictions += 1
                    self.discard(key)
            return before - (left if self._entries else 0)

    def discard(self, key: K) -> None:
        """Remove an entry and its pins."""
        with self._lock:
            entry = self._entries.pop(key, None)
        if entry is not None and self._on_evict is not None:
            self._on_evict(entry.value)

    def pin(self, key: K) -> None:
        self._add_pins(key, 1)

    def unpin(self, key: K) -> None:
        self._add_pins(key, -1)

    def _add_pins(self, key: K, change: int) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.pins = max(0, entry.pins + change)
