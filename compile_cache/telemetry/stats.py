"""Counters and events of the cache's work."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import BypassReason
from .host_load import HostLoad

_KEPT = 1024  # latest events and waits that are kept
SHORT_WAIT = 0.05  # seconds; logs, events and the panel leave out shorter waits
_MOMENT = 0.001  # seconds; a shorter wait is merged into the one before it


@dataclass
class Counters:
    """Totals since the process started.

    stall_seconds: time that prompts waited for compiling, comparing, loading regions, measuring attention, rehearsals
    and captures, including failed ones.
    """

    signatures: int = 0  # distinct calls; each costs at most one capture
    region_compiles: int = 0
    region_loads: int = 0  # compiled regions loaded from disk
    region_preloads: int = 0  # of these, loaded by the thread that preloads ahead of prompts
    compile_failures: int = 0
    verifications: int = 0
    captures: int = 0
    replays: int = 0
    original_replays: int = 0  # of these, replays of first-tier captures
    region_calls: int = 0
    graph_calls: int = 0  # forwards that ran compiled regions or were captured, without a replay
    eager_calls: int = 0  # forwards in which every block ran eagerly, or some block waited for code
    waiting_calls: int = 0  # of these, forwards that ran originals whose code was still being compiled
    evictions: int = 0
    streamed_bytes: int = 0  # of weights whose pages were absent when their block ran
    prologue_runs: int = 0  # parts of streamed blocks that depend on the timestep alone, see `dependence`
    prologue_reuses: int = 0  # how often a kept result was reused instead
    kept_bytes: int = 0  # current size of these results
    stall_seconds: float = 0.0
    bypasses: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something worth reporting. It ended `at` (Unix seconds) and took `seconds`.

    kind: signature, look, trace, compile, load, measure, capture, bypass or originals: consecutive calls of one run
    that ran originals whose code was still being compiled. A prompt's wait is an event too, of kind compile, load or
    capture, without a text.
    """

    kind: str
    text: str
    seconds: float = 0.0
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in time, for `Stats.since`: the counters, and the number of spans until then."""

    counters: dict[str, Any]
    spans: int


@dataclass(slots=True)
class _Open:
    """A thread's unfinished waits. kinds: the innermost last. since: the time up to which that one is counted."""

    kinds: list[str] = field(default_factory=list)
    since: float = 0.0


class Stats:
    """clock: seconds, for durations. `stalling` measures every second that a prompt waits and counts it once.

    host: the host time that calls leave for background work.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.host = HostLoad()
        self.counters = Counters()
        self._spans: deque[Event] = deque(maxlen=_KEPT)  # events and waits, in the order in which they began
        self._open: dict[int, _Open] = {}  # by thread
        self._lock = threading.Lock()
        self._seen_bypasses: set[str] = set()
        self._span_count = 0  # including spans that are no longer kept
        self._wait: Event | None = None  # the latest wait; None after a mark
        self._stretch: tuple[Event, int, int] | None = None  # latest event of kind originals, its calls, all others

    def event(self, kind: str, text: str, seconds: float = 0.0) -> None:
        with self._lock:
            self._keep(Event(kind, text, seconds))

    def _keep(self, span: Event, before: Event | None = None) -> Event:
        """Keep a span. It replaces `before`, the span that it continues, if that is still kept."""
        if before is not None and before in self._spans:
            self._spans[self._spans.index(before)] = span
        else:
            self._spans.append(span)
            self._span_count += 1
        return span

    @contextmanager
    def stalling(self, kind: str = "compile") -> Iterator[None]:
        """Count the time inside as a prompt's wait. A nested wait counts as its own kind, not again as this one."""
        thread = threading.get_ident()
        with self._lock:
            opened = self._open.setdefault(thread, _Open())
            self._count(opened)
            opened.kinds.append(kind)
        try:
            yield
        finally:
            with self._lock:
                self._count(opened)
                opened.kinds.pop()
                if not opened.kinds:
                    del self._open[thread]

    def _count(self, opened: _Open) -> None:
        """Count the time of the innermost wait up to now."""
        now = self.clock()
        if opened.kinds:
            self._add(opened.kinds[-1], max(now - opened.since, 0.0))
        opened.since = now

    def _add(self, kind: str, seconds: float) -> None:
        if not seconds:
            return
        self.counters.stall_seconds += seconds
        now, last = time.time(), self._wait
        if last is None or now - seconds - last.at >= _MOMENT or (last.kind != kind and seconds >= _MOMENT):
            self._wait = self._keep(Event(kind, "", seconds, now))
        else:
            self._wait = self._keep(Event(last.kind, "", last.seconds + seconds, now), last)

    @contextmanager
    def stall(self, kind: str, text: str, shortest: float = 0.0) -> Iterator[None]:
        """Like `stalling`, and record an event unless the wait took less than `shortest` seconds."""
        started = self.clock()
        with self.stalling("capture" if kind == "measure" else kind):
            yield
        if (seconds := self.clock() - started) >= shortest:
            self.event(kind, text, seconds)

    def waited_since(self, started: float, stalled: float, kind: str, text: str) -> None:
        """Add a stall retroactively, without double counting. stalled: `waiting_seconds` at `started`."""
        seconds = self.clock() - started
        with self._lock:
            self._add(kind, max(seconds - (self.counters.stall_seconds - stalled), 0.0))
        self.event("look", text, seconds)

    def waiting_seconds(self) -> float:
        """Return `stall_seconds` up to now, including unfinished waits. Any thread may call it."""
        with self._lock:
            now = self.clock()
            return self.counters.stall_seconds + sum(max(now - opened.since, 0.0) for opened in self._open.values())

    @property
    def events(self) -> list[Event]:
        """The latest events, oldest first."""
        with self._lock:
            return [span for span in self._spans if span.text]

    def mark(self) -> Mark:
        """Return the current point in time, for a later `since`."""
        counters = self.snapshot()
        with self._lock:
            self._stretch = self._wait = None
            return Mark(counters, self._span_count)

    def since(self, mark: Mark) -> dict[str, Any]:
        """Return the changes since `mark`, as arguments of `Run`: `counts`, the increase of each counter; `waited`, in
        seconds; `bypasses` by code; `events` and `waits`, as far as they are still kept.
        """
        now, before = self.snapshot(), mark.counters
        with self._lock:
            self._wait = None  # a later wait must not be merged into this one
            spans = tuple(self._spans)[max(len(self._spans) - (self._span_count - mark.spans), 0) :]
        events, waits = (tuple(span for span in spans if bool(span.text) is is_event) for is_event in (True, False))
        rise = Counter(now["bypasses"]) - Counter(before["bypasses"])
        counts = {name: value - before[name] for name, value in now.items() if name != "bypasses"}
        waited = counts.pop("stall_seconds")
        counts["region_loads"] -= counts.pop("region_preloads")  # not a run's work, even if they happened during it
        return {"counts": counts, "waited": waited, "bypasses": dict(rise), "events": events, "waits": waits}

    def forward_ran(self, compiled: bool, waits: bool = False, started: float = 0.0) -> None:
        """Count a forward that no replay answered. compiled: it ran compiled regions, or was captured. waits: it ran
        originals whose code is being compiled. started: on `clock`.
        """
        self.counters.waiting_calls += waits
        if compiled and not waits:
            self.counters.graph_calls += 1
        else:
            self.counters.eager_calls += 1
        if waits:
            self._ran_originals(self.clock() - started)

    def _ran_originals(self, seconds: float) -> None:
        counters, now = self.counters, time.time()
        others = counters.replays + counters.graph_calls + counters.eager_calls - counters.waiting_calls
        with self._lock:
            calls, before = 0, None
            if self._stretch is not None and self._stretch[2] == others and self._stretch[0] in self._spans:
                before, calls, _ = self._stretch
                seconds = now - before.at + before.seconds
            text = f"{calls + 1} calls ran originals: their code was coming"
            self._stretch = self._keep(Event("originals", text, seconds, now), before), calls + 1, others

    def bypass(self, reason: BypassReason) -> bool:
        """Count a bypass. Returns True the first time that this exact reason occurs, so that callers log it once."""
        self.counters.bypasses[reason.code.value] += 1
        text = str(reason)
        if text in self._seen_bypasses:
            return False
        self._seen_bypasses.add(text)
        self.event("bypass", text)
        return True

    def snapshot(self) -> dict[str, Any]:
        """Return the counters as plain data. Any thread may call it, because each copy is atomic."""
        bypasses = dict(self.counters.bypasses)
        return {**vars(self.counters), "bypasses": bypasses, "stall_seconds": self.waiting_seconds()}
