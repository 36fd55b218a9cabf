"""GraphCache: the one cache of a process. Every compiled call goes through `run`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, cast

import torch

from .backends.base import Call, Graph, LiveWeightsGraph, Program
from .config import CacheConfig
from .dispatcher import Action, Decision, Situation, decide
from .errors import BypassCode, BypassReason
from .keys import ANY_EPOCH, CaptureKey, GraphKey
from .memory_cache import ByteLRU, Entry
from .misses import FREED, SignatureBook
from .stats import Stats
from .store.shape_history import ShapeHistory

logger = logging.getLogger(__name__)

_FULL = 0.75  # of the budget: what is captured ahead leaves room for what is asked for
Used = dict[CaptureKey, bool]  # the calls that were made, and whether each has a capture


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A call with what was decided for it and, for a replay, what came of launching it."""

    call: Call
    key: CaptureKey
    decision: Decision
    output: Any
    out_of_memory: torch.cuda.OutOfMemoryError | None


class GraphCache:
    """Captures by key, bounded by bytes, with their bookkeeping.

    One lock guards every capture and replay: captures share memory and static buffers, and ComfyUI samples on one
    thread; a second thread (multi-GPU) waits here for a launch, or a look at a model, not for the GPU.
    """

    def __init__(self, config: CacheConfig | None = None) -> None:
        self.config = config or CacheConfig.from_environment()
        self.stats = Stats()
        self._graphs: ByteLRU[CaptureKey, Graph] = ByteLRU(self.config.budget_bytes, methodcaller("close"))
        self._latched: dict[CaptureKey, BypassReason] = {}
        self._book = SignatureBook()
        self._sessions: dict[int, list[CaptureKey]] = {}
        self._recordings: list[Used] = []
        folder = self.config.store_folder
        self.shapes = ShapeHistory(folder / "shapes" if folder is not None and self.config.remember else None)
        self._lock = threading.RLock()

    # --- calls -------------------------------------------------------------------------------------------------

    def run(self, program: Program, call: Call, recheck: Callable[[], Call] | None = None) -> Any:
        """Answer a call by the fastest right path. Raises only what the original forward raises.

        recheck: looks closely at the module and returns the call as it is now: `call` itself if nothing changed. It is
        called once, after a replay was launched, so that the look overlaps with the GPU's work, or before anything else
        runs. If it returns another call, the replay's output is dropped and that call is answered.
        """
        with self._lock:
            attempt = self._begin(program, call)
            if recheck is not None and (call_now := recheck()) is not call:
                attempt = self._begin(program, call_now)
            result = self._finish(program, attempt)
            for recording in self._recordings:
                recording[attempt.key] = attempt.key in self._graphs
            return result

    def _begin(self, program: Program, call: Call) -> _Attempt:
        """Decide what happens to a call. A replay is launched at once; nothing else runs, and nothing is counted."""
        key = _key(program, call)
        if program.capabilities.reads_live_weights:
            self._drop_unrefreshable(key.owner, call.epoch)
        decision = self._decide(program, call, key)
        output, error = self._replay(key, call.tensors) if decision.action is Action.REPLAY else (None, None)
        return _Attempt(call, key, decision, output, error)

    def _replay(
        self, key: CaptureKey, tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, torch.cuda.OutOfMemoryError | None]:
        """Launch the replay of a capture: its output, or the error if memory ran out."""
        graph = self._graphs.get(key)
        assert graph is not None, "the decision saw it under the same lock"
        try:
            return graph.replay(tensors), None
        except torch.cuda.OutOfMemoryError as error:
            return None, error

    def _finish(self, program: Program, attempt: _Attempt) -> Any:
        """Do what was decided, and count it."""
        call, key, action = attempt.call, attempt.key, attempt.decision.action
        if attempt.decision.reason is not None:
            self._count_bypass(attempt.decision.reason)
        if attempt.out_of_memory is not None:
            return self._retry_without_graphs(call, key, attempt.out_of_memory)
        if action is Action.REPLAY:
            self._pin(key)
            self.stats.counters.replays += 1
            self.shapes.record(call.key, program)
            return attempt.output
        difference = self._record_signature(program, call, key)
        try:
            result = call.invoke(call.tensors) if action is Action.EAGER else program.run(call)
        except torch.cuda.OutOfMemoryError as error:
            return self._retry_without_graphs(call, key, error)
        if action is Action.EAGER:
            self.stats.counters.eager_calls += 1
            return result
        self.stats.counters.graph_calls += 1
        seconds = 0.0
        if action is Action.CAPTURE:
            seconds = self._capture(program, call, key, result, difference or FREED)
            self._pin(key)
        if difference is not None and call.capture_blocker is None:
            self.shapes.record(call.key, program, seconds)
        return result

    def prepare(self, program: Program, call: Call) -> bool:
        """Capture before the first call of this signature. False where it is no use to go on: for lack of room, or
        because it failed. Raises what cancels.
        """
        key = _key(program, call)
        with self._lock:
            if key in self._graphs or key in self._latched:
                return True
            if self._graphs.bytes > self._graphs.budget * _FULL:
                return False
            try:
                result = program.run(call)
                self._record_signature(program, call, key)
                self._capture(program, call, key, result, "remembered")
            except call.progress.cancellations:
                raise
            except Exception as error:
                logger.info("Resolute: %s was not captured ahead", key.shape, exc_info=error)
            if key in self._graphs:
                return True
            self._latched.pop(key, None)  # the first real call may have more room
            return False

    def _record_signature(self, program: Program, call: Call, key: CaptureKey) -> str | None:
        """Why this signature is new, told as an event; None where it was met before."""
        # Where nothing is captured, it does not matter where the weights are.
        exact = key if program.capabilities.captures else replace(key, epoch=0)
        why = self._book.notice(key.owner, exact, exact.components())
        if why is not None:
            self.stats.counters.signatures += 1
            text = f"{key.graph.role.value} {key.shape}: {why}"
            self.stats.event("signature", text)
            call.progress.detail(text)
        return why

    def _decide(self, program: Program, call: Call, key: CaptureKey) -> Decision:
        return decide(
            Situation(
                compiles=program.capabilities.compiles,
                captures=program.capabilities.captures and self.config.capture,
                ready=key in self._graphs,
                forward_bypass=call.forward_bypass,
                capture_blocker=call.capture_blocker or self._latched.get(key),
            )
        )

    def _capture(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str) -> float:
        """Make the capture of a call that gave `result`. Returns the seconds; where it fails, the key is latched."""
        started = time.perf_counter()
        self.drop_stale(key.owner, call.epoch)
        call.progress.raise_if_cancelled()
        try:
            graph = program.capture(call, result)
        except Exception as error:
            if isinstance(error.__cause__, call.progress.cancellations):
                raise error.__cause__ from None
            if isinstance(error, call.progress.cancellations):
                raise
            self._latch(key, BypassReason(BypassCode.CAPTURE_FAILED, str(error)))
            return 0.0
        seconds = time.perf_counter() - started
        self.stats.counters.captures += 1
        self.stats.counters.stall_seconds += seconds
        self.stats.event("capture", f"{key.shape}: {why}", seconds)
        if not self._graphs.put(key, graph, graph.bytes):
            graph.close()
            told = f"a capture of {key.shape} takes {graph.bytes >> 20} MiB, more than the cache may use beside the "
            told += f"ones in use; raise RESOLUTE_BUDGET_MB (now {self._graphs.budget >> 20})"
            self._latch(key, BypassReason(BypassCode.OUT_OF_MEMORY, told))
        elif not program.capabilities.returns_memory:
            self._graphs.pin(key)  # for good: to evict it would free nothing
        self.stats.counters.evictions = self._graphs.evictions
        return seconds

    def _retry_without_graphs(self, call: Call, key: CaptureKey, error: torch.cuda.OutOfMemoryError) -> Any:
        freed = self._graphs.trim(0)
        self.stats.counters.evictions = self._graphs.evictions
        if not freed:
            raise error
        del error
        torch.cuda.empty_cache()
        self._latch(key, BypassReason(BypassCode.OUT_OF_MEMORY, f"out of memory at {key.shape}; captures were freed"))
        result = call.invoke(call.tensors)
        self.stats.counters.eager_calls += 1
        return result

    def _latch(self, key: CaptureKey, reason: BypassReason) -> None:
        self._latched[key] = reason
        self._count_bypass(reason)

    def _count_bypass(self, reason: BypassReason) -> None:
        if self.stats.bypass(reason):
            logger.info("Resolute: %s", reason)

    # --- sessions ----------------------------------------------------------------------------------------------

    def open_session(self, owner: int) -> None:
        """Keep the captures that a sampling run uses until it ends; a run that was left open (cancelled) ends first."""
        with self._lock:
            self.close_session(owner)
            self._sessions[owner] = []

    def close_session(self, owner: int) -> None:
        with self._lock:
            for key in self._sessions.pop(owner, []):
                self._graphs.unpin(key)

    def _pin(self, key: CaptureKey) -> None:
        session = self._sessions.get(key.owner)
        if session is not None and key in self._graphs and key not in session:
            self._graphs.pin(key)
            session.append(key)

    @contextmanager
    def watching(self) -> Iterator[Used]:
        """The calls that are made meanwhile, from any thread."""
        used: Used = {}
        self._recordings.append(used)
        try:
            yield used
        finally:
            self._recordings = [watch for watch in self._recordings if watch is not used]

    def still_ready(self, used: Used) -> bool:
        """Whether calls that were made before would be answered as fast again: no capture of theirs is gone."""
        return bool(used) and all(key in self._graphs for key, captured in used.items() if captured)

    def bytes_of(self, used: Used) -> int:
        """What the captures of these calls take."""
        return sum(entry.bytes for key, entry in self._graphs if key in used)

    # --- memory ------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        return self._graphs.bytes

    def trim(self, bytes_to_free: int | None = None) -> int:
        """Free captures that no session uses, oldest first; all of them by default. Returns the bytes freed."""
        with self._lock:
            limit = 0 if bytes_to_free is None else max(0, self._graphs.bytes - bytes_to_free)
            freed = self._graphs.trim(limit)
            self._latched.clear()
            self.stats.counters.evictions = self._graphs.evictions
            return freed

    def forget(self, owner: int) -> None:
        """Drop everything of a module that is gone."""
        with self._lock:
            self.close_session(owner)
            self._book.forget(owner)
            for key, _ in self._graphs:
                if key.owner == owner:
                    self._graphs.discard(key)
            self._latched = {key: reason for key, reason in self._latched.items() if key.owner != owner}

    def drop_stale(self, owner: int, epoch: int) -> None:
        """A new weights epoch makes the module's older captures useless: drop them."""
        with self._lock:
            useful = (epoch, ANY_EPOCH)
            for key, _ in self._graphs:
                if key.owner == owner and key.epoch not in useful:
                    self._graphs.discard(key)
            self._drop_unrefreshable(owner, epoch)
            self._latched = {k: r for k, r in self._latched.items() if k.owner != owner or k.epoch in useful}

    def _drop_unrefreshable(self, owner: int, epoch: int) -> None:
        """Of the graphs that follow their weights, drop those that cannot."""
        for key, entry in self._graphs:
            if key.owner == owner and key.epoch == ANY_EPOCH:
                graph = cast(LiveWeightsGraph, entry.value)
                if not graph.refresh_weights(epoch):
                    self._graphs.discard(key)

    # --- reports -----------------------------------------------------------------------------------------------

    def captured(self) -> list[tuple[GraphKey, Entry[Graph]]]:
        """Every graph that has a capture now, the least recently used first."""
        return [(key.graph, entry) for key, entry in self._graphs]

    def report(self) -> dict[str, Any]:
        """Plain data for `GET /resolute/cache` and the report node. Never waits for a call that is running."""
        entries = [
            {**graph.plain(), "state": "captured", "bytes": entry.bytes, "hits": entry.hits}
            for graph, entry in self.captured()
        ]
        return {
            "counters": self.stats.snapshot(),
            "bytes": self._graphs.bytes,
            "budget_bytes": self._graphs.budget,
            "entries": entries,
        }


def _key(program: Program, call: Call) -> CaptureKey:
    epoch = ANY_EPOCH if program.capabilities.reads_live_weights else call.epoch
    return CaptureKey(call.key, call.device, program.owner, epoch)
