"""The captures of a process: bounded by bytes, pinned by sampling runs, dropped when their weights move."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..backends.base import Call, Graph, Program
from ..backends.cuda_graphs.memory import driver_graph_bytes, is_trimmable, release_graph_memory
from ..backends.cuda_graphs.pools import pool_bytes
from ..keys import ANY_EPOCH, CaptureKey, GraphKey, Tier
from ..tuning.stopwatch import Stopwatch

_KEPT = 32 << 20  # bytes of captures that stay when all models are unloaded

Reach = Callable[[str], int]  # returns the bytes that a device ("cuda:0") could provide; 0 if unknown


def free_bytes(device: str) -> int:
    """Return the bytes that a device ("cuda:0") could provide; 0 if unknown. They include torch's unused cached memory
    and the driver's memory of graphs, which the next capture uses as its workspace too.
    """
    if not device.startswith("cuda"):
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    of_graphs = driver_graph_bytes(torch.device(device).index or 0) if is_trimmable() else 0
    return torch.cuda.mem_get_info(device)[0] + max(unused, 0) + of_graphs


def capture_key(program: Program, call: Call, tier: Tier = Tier.COMPILED) -> CaptureKey:
    epoch = ANY_EPOCH if program.capabilities.keeps_graphs else call.epoch
    return CaptureKey(call.key, call.device, program.owner, epoch, call.torch_flags, tier)


@dataclass(slots=True)
class Entry:
    """A capture. is_mixed: it contains originals and compiled code. watch: times its first replay."""

    value: Graph
    bytes: int
    is_mixed: bool = False
    hits: int = 0
    watch: Stopwatch | None = None

    @property
    def gain(self) -> float | None:
        """The speed-up of a replay over the call without a capture; None if it is not known, or not yet."""
        uncaptured = getattr(self.value, "uncaptured_seconds", 0.0)  # OneFlow's graphs lack it
        seconds = self.watch.seconds(wait=False) if self.watch is not None else None
        return uncaptured / seconds if uncaptured and seconds else None


class Captures:
    """Captures by key, the least recently used first; each is closed when it is removed. GraphCache's lock guards all
    methods but the reports. These take a separate lock, held only briefly, because they must not wait for a forward.
    """

    def __init__(self, budget: int) -> None:
        """budget: in bytes."""
        self.budget = budget
        self.evictions = 0
        self._entries: OrderedDict[CaptureKey, Entry] = OrderedDict()
        self._sessions: dict[int, set[CaptureKey]] = {}  # the captures that each module's sampling run pinned
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: CaptureKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[tuple[CaptureKey, Entry]]:
        with self._lock:
            return iter(list(self._entries.items()))

    @property
    def bytes(self) -> int:
        total = sum(entry.bytes for _, entry in self)
        return total + self.shared_bytes() if len(self) else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the captures that cannot be evicted now, without the shared pool."""
        return sum(entry.bytes for key, entry in self if self._is_pinned(key))

    def _is_pinned(self, key: CaptureKey) -> bool:
        return key.epoch == ANY_EPOCH or key in self._sessions.get(key.owner, ())

    def shared_bytes(self) -> int:
        """Return the bytes of the shared pool; 0 if it can be released without evicting a capture."""
        return 0 if is_trimmable() else pool_bytes()

    def get(self, key: CaptureKey) -> Entry | None:
        """Return the capture, counted as a hit and now the most recently used, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.hits += 1
            self._entries.move_to_end(key)
            return entry

    def of_first_tier(self, owner: int) -> list[CaptureKey]:
        """The module's captures that replay originals."""
        return [key for key, _ in self if key.tier is Tier.ORIGINAL and key.owner == owner]

    def put(self, key: CaptureKey, graph: Graph, size: int, is_mixed: bool = False) -> bool:
        """Keep a capture of `size` bytes; evict others. Returns False if it does not fit beside the pinned ones.

        is_mixed: see `Entry`.
        """
        self.discard(key)
        if self.pinned_bytes + size > self.budget:
            return False
        self.trim(self.budget - size + self.shared_bytes())  # an eviction frees no shared memory
        with self._lock:
            self._entries[key] = Entry(graph, size, is_mixed)
        return True

    def trim(self, limit: int) -> int:
        """Evict unpinned captures, oldest first, down to `limit` bytes. Returns the bytes freed."""
        before = left = self.bytes
        for key, entry in self:
            if left <= limit:
                break
            if not self._is_pinned(key):
                left -= entry.bytes
                self.evictions += 1
                self.discard(key)
        return before - (left if self._entries else 0)

    def discard(self, key: CaptureKey) -> None:
        """Remove a capture and its pin."""
        with self._lock:
            entry = self._entries.pop(key, None)
        self._sessions.get(key.owner, set()).discard(key)
        if entry is not None:
            entry.value.close()

    def room_to_work_in(self, buffers: int, device: str) -> int:
        """Return the limit of a replay's workspace, in bytes, if its capture has buffers of `buffers` bytes.

        The workspace is the pool that captures share. A replay may use all of the present pool; more must fit into the
        budget beside the buffers of pinned captures. If a pool can be released when a run ends (`keep_to_budget`), it
        is no more than the run would need without a capture, so three quarters of the device are allowed.
        """
        if is_trimmable():
            return max(self.budget, torch.cuda.mem_get_info(device)[1] // 4 * 3)
        return max(self.budget - self.pinned_bytes - buffers, self.shared_bytes())

    @property
    def held_bytes(self) -> int:
        """All device bytes that captures occupy now."""
        buffers = sum(entry.bytes for _, entry in self)
        return buffers + pool_bytes() if len(self) else 0

    def held_by_device(self) -> dict[str, int]:
        """Return `held_bytes` of each device that has captures ("cuda:0")."""
        buffers = Counter[str]()
        for key, entry in self:
            buffers[key.device] += entry.bytes
        return {device: size + pool_bytes(torch.device(device).index) for device, size in buffers.items()}

    def keep_to_budget(self) -> None:
        """If captures exceed the budget, release their workspace. Not during a sampling run, whose next step would need
        it again."""
        if not self._sessions and len(self) and is_trimmable() and self.held_bytes > self.budget:
            release_graph_memory()

    def give_back(self, everything: bool) -> int:
        """Release the workspace of captures. Returns the bytes that were given back.

        If it cannot be released while captures live, only `everything` closes the captures that no session uses: they
        cost more than other memory. `everything` also closes the oldest until the rest occupy _KEPT.
        """
        before = self.held_bytes
        if is_trimmable():
            release_graph_memory()
        if everything:
            self.trim(_KEPT)
            self.released()
        return before - self.held_bytes

    def free(self, wanted: int | None) -> int:
        """Free `wanted` bytes, or all if None: first the workspace, then the oldest captures that no session uses.
        Returns the bytes freed."""
        before = self.held_bytes
        if wanted is not None and is_trimmable():
            release_graph_memory()
            wanted -= before - self.held_bytes
        if wanted is None or wanted > 0:
            self.trim(0 if wanted is None else max(0, self.bytes - wanted))
        self.released()
        return before - self.held_bytes

    def released(self) -> None:
        """Give the memory of closed captures back to the device."""
        release_graph_memory()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def report(self, size_of: Callable[[GraphKey], str]) -> dict[str, Any]:
        """Return plain data: the bytes in use, their limit, and each capture. size_of: a graph's size for the user."""
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
        return {"bytes": self.held_bytes, "budget_bytes": self.budget, "entries": entries}

    def open_session(self, owner: int) -> None:
        """Start a sampling run of a module. An earlier run that was never closed (cancelled) ends."""
        self._sessions[owner] = set()

    def close_session(self, owner: int) -> None:
        """End the sampling run: its captures may be evicted again."""
        self._sessions.pop(owner, None)

    def pin_for_session(self, key: CaptureKey) -> None:
        """Keep a capture until the sampling run of its module ends, if there is one."""
        session = self._sessions.get(key.owner)
        if session is not None and key in self:
            session.add(key)

    def forget(self, owner: int) -> None:
        """Drop the captures of a module that was garbage collected."""
        self.close_session(owner)
        for key, _ in self:
            if key.owner == owner:
                self.discard(key)

    def drop_stale(self, owner: int, epoch: int) -> None:
        """Drop the module's captures that read former addresses of its weights and cannot be refreshed."""
        for key, entry in self:
            if key.owner != owner or key.epoch == epoch:
                continue
            if key.epoch != ANY_EPOCH or not cast(Any, entry.value).refresh_weights(epoch):
                self.discard(key)
