"""Make the captures of a cache."""

from __future__ import annotations

from typing import Any

import torch

from ..backends.base import Call, CaptureFacts, Program
from ..backends.cuda_graphs.memory import release_graph_memory
from ..backends.cuda_graphs.run_cost import RunCost
from ..choices.gpu_bound import LEAST_HOST_SHARE
from ..errors import NoGainError, OverBudgetError
from ..keys import CaptureKey
from ..stats import Stats
from ..torch_facts.private_names import pytree
from .captures import Captures
from .refusals import Refusals


class CaptureMaker:
    """Puts captures into `captures`, and tells `refusals` what failed. GraphCache's lock guards it."""

    def __init__(self, captures: Captures, refusals: Refusals, stats: Stats, spare: int = 0) -> None:
        """spare: see `CacheConfig.spare_bytes`."""
        self._captures = captures
        self._refusals = refusals
        self._stats = stats
        self._spare = spare

    def make(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str, cost: RunCost) -> float:
        """Capture a call whose run gave `result`. cost: of that run. Returns the seconds that the capture took.

        Raises only what cancels.
        """
        with self._stats.stalling("capture"):  # also for a capture that fails, after its rehearsal
            return self._make(program, call, key, result, why, cost)

    def _make(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str, cost: RunCost) -> float:
        started = self._stats.clock()
        captures, budget = self._captures, self._captures.budget
        captures.drop_stale(key.owner, call.epoch)
        self._refusals.drop_stale(key.owner, call.epoch)
        room = captures.room_to_work_in(_bytes_of(call, result), call.device)
        if self._refusals.refuse_if_too_large(key, room, budget):
            return 0.0
        if call.weights.pages and not self._refusals.fits(key, call.weights.bytes):
            self._refusals.no_room(key)
            return 0.0
        shared = captures.shared_bytes()
        call.progress.raise_if_cancelled()
        try:
            facts = CaptureFacts(cost.bytes, room, self._spare, cost.host_share(), LEAST_HOST_SHARE)
            graph = program.capture(call, result, facts)
        except Exception as error:
            if isinstance(error.__cause__, call.progress.cancellations):
                raise error.__cause__ from None
            if isinstance(error, call.progress.cancellations):
                raise
            if not isinstance(error, (NoGainError, OverBudgetError)):  # these come before anything is recorded
                release_graph_memory()
            self._refusals.capture_failed(key, error, budget, room)
            return 0.0
        seconds = self._stats.clock() - started
        self._refusals.captured(key)
        grown = captures.shared_bytes()
        too_large = grown > max(budget, shared)  # its memory grew by more than was measured
        if too_large or not captures.put(key, graph, graph.bytes):
            size = graph.bytes
            graph.close()
            release_graph_memory()
            self._refusals.over_budget(key, size + grown - shared, budget)
        else:
            self._stats.counters.captures += 1
            self._stats.event("capture", f"{key.shape}: {why}", seconds)
            if not program.capabilities.returns_memory:
                captures.pin(key)  # for good: evicting it would free nothing
        self._stats.counters.evictions = captures.evictions
        return seconds


def _bytes_of(call: Call, result: Any) -> int:
    """Bytes of the buffers that a capture of this call will have."""
    leaves = (*call.tensors, *pytree.tree_leaves(result))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
