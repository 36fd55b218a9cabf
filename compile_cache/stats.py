"""Counters and events of what the cache did."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .errors import BypassReason

_KEPT_EVENTS = 512
_SHORT_WAIT = 0.05  # seconds


@dataclass
class Counters:
    """Totals since the process started.

    stall_seconds: what prompts waited for: compiling, comparing, loading regions, measuring attention, rehearsing and
    capturing, also where that failed.
    """

    signatures: int = 0  # distinct calls; each costs one capture at most
    region_compiles: int = 0
    region_loads: int = 0  # compiled regions loaded from disk
    compile_failures: int = 0
    verifications: int = 0
    captures: int = 0
    replays: int = 0
    region_calls: int = 0
    graph_calls: int = 0  # forwards through compiled regions, without a replay
    eager_calls: int = 0
    evictions: int = 0
    stall_seconds: float = 0.0
    bypasses: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth reporting, that ended `at` (Unix seconds) and took `seconds`.

    kind: signature, look, trace, compile, load, measure, capture or bypass.
    """

    kind: str
    text: str
    seconds: float = 0.0
    at: float = field(default_factory=time.time)


class Stats:
    """clock: seconds, for durations."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.counters = Counters()
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._lock = threading.Lock()
        self._seen_bypasses: set[str] = set()
        self.event_count = 0  # of all events, also of those no longer kept

    def event(self, kind: str, text: str, seconds: float = 0.0) -> None:
        with self._lock:
            self._events.append(Event(kind, text, seconds))
            self.event_count += 1

    def waited(self, kind: str, text: str, seconds: float) -> None:
        """A prompt waited for something that no counter counts. Less than _SHORT_WAIT is left out."""
        if seconds >= _SHORT_WAIT:
            self.counters.stall_seconds += seconds
            self.event(kind, text, seconds)

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """A prompt waits meanwhile. Adds the time to `stall_seconds`, without what is added to it inside."""
        started, counted = self.clock(), self.counters.stall_seconds
        try:
            yield
        finally:
            inside = self.counters.stall_seconds - counted
            self.counters.stall_seconds += max(self.clock() - started - inside, 0.0)

    @contextmanager
    def stall(self, kind: str, text: str) -> Iterator[None]:
        """As `stalling`, and an event tells of it."""
        started = self.clock()
        with self.stalling():
            yield
        self.event(kind, text, self.clock() - started)

    @property
    def events(self) -> list[Event]:
        """The latest events, oldest first."""
        with self._lock:
            return list(self._events)

    def events_since(self, count: int) -> list[Event]:
        """The events after the first `count` ones, as far as they are still kept."""
        with self._lock:
            return list(self._events)[max(len(self._events) - (self.event_count - count), 0) :]

    def bypass(self, reason: BypassReason) -> bool:
        """Count a bypass. Returns True the first time that this exact reason occurs: then it deserves a log line."""
        self.counters.bypasses[reason.code.value] += 1
        text = str(reason)
        if text in self._seen_bypasses:
            return False
        self._seen_bypasses.add(text)
        self.event("bypass", text)
        return True

    def snapshot(self) -> dict[str, Any]:
        """The counters as plain data, from any thread: each is copied in one piece."""
        return {**vars(self.counters), "bypasses": dict(self.counters.bypasses)}
