"""The captures of a process: bounded by bytes, pinned by sampling runs, dropped when their weights move."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, cast

from .backends.base import Call, Graph, LiveWeightsGraph, Program
from .backends.cuda_graphs.pools import pool_bytes
from .errors import BypassReason
from .keys import ANY_EPOCH, CaptureKey, GraphKey
from .latches import MemoryLatches
from .memory_cache import ByteLRU


def capture_key(program: Program, call: Call) -> CaptureKey:
    """The key of a call's capture: a graph that reads the present weights in each replay serves every epoch."""
    epoch = ANY_EPOCH if program.capabilities.reads_live_weights else call.epoch
    return CaptureKey(call.key, call.device, program.owner, epoch, call.state)


class Captures(ByteLRU[CaptureKey, Graph]):
    """Captures by key, each closed when it leaves. GraphCache's lock guards all but the reports.

    blockers: why the call of a key is not captured again, after a capture of it failed.
    latches: the same for a lack of memory, which passes.
    """

    def __init__(self, budget: int, shared: Callable[[], int] = pool_bytes) -> None:
        """budget: in bytes. shared: bytes that captures work in together."""
        super().__init__(budget, methodcaller("close"))
        self.shared_bytes = shared  # type: ignore[method-assign]
        self.blockers: dict[CaptureKey, BypassReason] = {}
        self.latches = MemoryLatches()
        self._sessions: dict[int, list[CaptureKey]] = {}  # the captures that each module's sampling run pinned

    def blocker(self, key: CaptureKey) -> BypassReason | None:
        """Why the call of a key is not captured now; None if nothing is known against it."""
        return self.blockers.get(key) or self.latches.reason(key)

    def room_to_work_in(self, own: int) -> int:
        """Bytes that a replay may work in, if its capture has buffers of `own` bytes.

        It works in the memory that captures share. What they hold already is free for it; more must fit into the budget
        beside the buffers of the captures in use.
        """
        return max(self.budget - self.pinned_bytes - own, self.shared_bytes())

    def report(self, size_of: Callable[[GraphKey], str]) -> dict[str, Any]:
        """Plain data: the bytes in use, their limit, and each capture. size_of: what a graph computes for the user."""
        entries = [
            {
                **key.graph.plain(),
                "size": size_of(key.graph),
                "state": "captured",
                "bytes": entry.bytes,
                "hits": entry.hits,
            }
            for key, entry in self
        ]
        return {"bytes": self.bytes, "budget_bytes": self.budget, "entries": entries}

    def open_session(self, owner: int) -> None:
        """A sampling run of a module starts. A run that was never closed (cancelled) ends first."""
        self.close_session(owner)
        self._sessions[owner] = []

    def close_session(self, owner: int) -> None:
        """The sampling run is over: its captures may be evicted again."""
        for key in self._sessions.pop(owner, []):
            self.unpin(key)

    def pin_for_session(self, key: CaptureKey) -> None:
        """Keep a capture until the sampling run of its module ends, if there is one."""
        session = self._sessions.get(key.owner)
        if session is not None and key in self and key not in session:
            self.pin(key)
            session.append(key)

    def forget(self, owner: int) -> None:
        """Drop everything of a module that was garbage collected."""
        self.close_session(owner)
        for key, _ in self:
            if key.owner == owner:
                self.discard(key)
        self.blockers = {key: reason for key, reason in self.blockers.items() if key.owner != owner}
        self.latches.forget(owner)

    def drop_stale(self, owner: int, epoch: int) -> None:
        """Drop the module's captures of earlier weights epochs: they read addresses where its weights no longer are."""
        current = (epoch, ANY_EPOCH)
        for key, _ in self:
            if key.owner == owner and key.epoch not in current:
                self.discard(key)
        self.drop_unrefreshable(owner, epoch)
        self.blockers = {
            key: reason for key, reason in self.blockers.items() if key.owner != owner or key.epoch in current
        }

    def drop_unrefreshable(self, owner: int, epoch: int) -> None:
        """Of the module's graphs that read its weights in each replay, drop those that cannot read the present ones."""
        for key, entry in self:
            if key.owner == owner and key.epoch == ANY_EPOCH:
                graph = cast(LiveWeightsGraph, entry.value)
                if not graph.refresh_weights(epoch):
                    self.discard(key)
