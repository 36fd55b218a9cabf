"""GraphCache: the one cache of a process. Every compiled call goes through `run`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from .backends.base import Call, FollowingGraph, Graph, Program
from .config import CacheConfig
from .dispatcher import Action, Decision, Situation, decide
from .errors import BypassCode, BypassReason
from .keys import CaptureKey
from .memory_cache import ByteLRU
from .misses import FREED, SignatureBook
from .stats import Stats

logger = logging.getLogger(__name__)

# In the key of a graph that follows its weights: it serves every epoch.
_ANY_EPOCH = -1


class GraphCache:
    """Captures by key, bounded by bytes, with their bookkeeping.

    One lock guards every capture and replay: captures share memory and static buffers, and ComfyUI samples on one
    thread; a second thread (multi-GPU) waits here for a launch, not for the GPU.
    """

    def __init__(self, config: CacheConfig | None = None) -> None:
        self.config = config or CacheConfig.from_environment()
        self.stats = Stats()
        self._graphs: ByteLRU[CaptureKey, Graph] = ByteLRU(self.config.budget_bytes, self._close)
        self._latched: dict[CaptureKey, BypassReason] = {}
        self._book = SignatureBook()
        self._sessions: dict[int, list[CaptureKey]] = {}
        self._lock = threading.RLock()

    # --- calls -------------------------------------------------------------------------------------------------

    def run(self, program: Program, call: Call) -> Any:
        """Answer a call by the fastest right path. Raises only what the original forward raises."""
        follows = program.capabilities.follows_weights
        key = CaptureKey(call.key, call.device, program.owner, _ANY_EPOCH if follows else call.epoch)
        with self._lock:
            if follows:
                self._drop_left_behind(key.owner, call.epoch)
            decision = self._decide(program, call, key)
            if decision.reason is not None:
                self._note(decision.reason)
            news = None if decision.action is Action.REPLAY else self._notice(program, call, key)
            try:
                if decision.action is Action.REPLAY:
                    return self._replay(key, call)
                if decision.action is Action.EAGER:
                    result = call.invoke(call.tensors)
                    self.stats.counters.eager_calls += 1
                    return result
                result = program.run(call)
            except torch.cuda.OutOfMemoryError as error:
                return self._retry_without_graphs(call, key, error)
            self.stats.counters.graph_calls += 1
            if decision.action is Action.CAPTURE:
                self._capture(program, call, key, result, news or FREED)
            return result

    def _notice(self, program: Program, call: Call, key: CaptureKey) -> str | None:
        """Why this signature is new, told as an event; None where it was met before."""
        # Where nothing is captured, it does not matter where the weights are.
        exact = key if program.capabilities.captures else replace(key, epoch=0)
        why = self._book.notice(key.owner, exact, exact.components())
        if why is not None:
            self.stats.counters.signatures += 1
            text = f"{key.graph.role.value} {_shape(key)}: {why}"
            self.stats.event("signature", text)
            call.monitor.note(text)
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

    def _replay(self, key: CaptureKey, call: Call) -> Any:
        graph = self._graphs.get(key)
        assert graph is not None, "the decision saw it under the same lock"
        self._pin(key)
        result = graph.replay(call.tensors)
        self.stats.counters.replays += 1
        return result

    def _capture(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str) -> None:
        started = time.perf_counter()
        self.drop_stale(key.owner, call.epoch)
        call.monitor.checkpoint()
        try:
            graph = program.capture(call, result)
        except Exception as error:
            if isinstance(error.__cause__, call.monitor.cancellations):
                raise error.__cause__ from None
            if isinstance(error, call.monitor.cancellations):
                raise
            self._latch(key, BypassReason(BypassCode.CAPTURE_FAILED, str(error)))
            return
        seconds = time.perf_counter() - started
        self.stats.counters.captures += 1
        self.stats.counters.stall_seconds += seconds
        self.stats.event("capture", f"{_shape(key)}: {why}", seconds)
        if not self._graphs.put(key, graph, graph.bytes):
            graph.close()
            self._latch(
                key,
                BypassReason(
                    BypassCode.OUT_OF_MEMORY,
                    f"a capture of {_shape(key)} takes {graph.bytes >> 20} MiB, more than the cache may use beside the "
                    f"ones in use; raise RESOLUTE_BUDGET_MB (now {self._graphs.budget >> 20})",
                ),
            )
            return
        if not program.capabilities.returns_memory:
            self._graphs.pin(key)  # for good: to evict it would free nothing
        self._pin(key)
        self.stats.counters.evictions = self._graphs.evictions

    def _retry_without_graphs(self, call: Call, key: CaptureKey, error: torch.cuda.OutOfMemoryError) -> Any:
        freed = self._graphs.trim(0)
        self.stats.counters.evictions = self._graphs.evictions
        if not freed:
            raise error
        del error
        torch.cuda.empty_cache()
        self._latch(key, BypassReason(BypassCode.OUT_OF_MEMORY, f"out of memory at {_shape(key)}; captures were freed"))
        result = call.invoke(call.tensors)
        self.stats.counters.eager_calls += 1
        return result

    def _latch(self, key: CaptureKey, reason: BypassReason) -> None:
        self._latched[key] = reason
        self._note(reason)

    def _note(self, reason: BypassReason) -> None:
        if self.stats.bypass(reason):
            logger.info("Resolute: %s", reason)

    # --- sessions ----------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, owner: int) -> Iterator[None]:
        """Keep the captures that one sampling run uses until it ends."""
        self.open_session(owner)
        try:
            yield
        finally:
            self.close_session(owner)

    def open_session(self, owner: int) -> None:
        """Start pinning for a module; a session that was left open (a cancelled run) is closed first."""
        with self._lock:
            self.close_session(owner)
            self._sessions[owner] = []

    def close_session(self, owner: int) -> None:
        with self._lock:
            for key in self._sessions.pop(owner, []):
                self._graphs.unpin(key)

    def _pin(self, key: CaptureKey) -> None:
        session = self._sessions.get(key.owner)
        if session is not None and key not in session:
            self._graphs.pin(key)
            session.append(key)

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
            useful = (epoch, _ANY_EPOCH)
            for key, _ in self._graphs:
                if key.owner == owner and key.epoch not in useful:
                    self._graphs.discard(key)
            self._drop_left_behind(owner, epoch)
            self._latched = {k: r for k, r in self._latched.items() if k.owner != owner or k.epoch in useful}

    def _drop_left_behind(self, owner: int, epoch: int) -> None:
        """Of the graphs that follow their weights, drop those that cannot."""
        for key, entry in self._graphs:
            if key.owner == owner and key.epoch == _ANY_EPOCH:
                graph = cast(FollowingGraph, entry.value)
                if not graph.follow(epoch):
                    self._graphs.discard(key)

    @staticmethod
    def _close(graph: Graph) -> None:
        graph.close()

    # --- reports -----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Plain data for `GET /resolute/cache` and the report node. Never waits for a call that is running."""
        entries = [
            {
                "model": key.graph.model[:12],
                "role": key.graph.role.value,
                "latent_shape": list(key.graph.signature.latent_shape),
                "signature": {name: str(spec) for name, spec in key.graph.signature.tensors},
                "backend": key.graph.backend,
                "state": "captured",
                "bytes": entry.bytes,
                "hits": entry.hits,
            }
            for key, entry in self._graphs
        ]
        return {
            "counters": self.stats.snapshot(),
            "bytes": self._graphs.bytes,
            "budget_bytes": self._graphs.budget,
            "entries": entries,
        }


def _shape(key: CaptureKey) -> str:
    return "x".join(map(str, key.graph.signature.latent_shape))
