"""A region that a call queued for compilation, and the strategies to compile it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..lower.tracing import Shapes, general_hints
from ..regions.region import RegionCall

# Tried in turn until the compiled code is correct: (trace at general sizes, not at the call's; `oblivious`, see
# `size_one_is_general`).
TRACE_STRATEGIES = ((True, True), (True, False), (False, True), (False, False))
AT_SIZES = 2  # the first strategy that traces at the call's sizes


@dataclass(eq=False)
class CompileTask:
    """A copy of a call that reached a region without code.

    settings: `settings_for` at the call. weights: the block's number of weights. strategy: index of the next strategy.
    was_killed: a worker ended while it compiled the region. is_foreseen: no call has reached the region yet. calls:
    later calls that reached it. is_decoder: part of a VAE, which runs once, not in each step. lock: keeps other
    processes from compiling the region. not_before: earliest start. found_no_memory: the last try ran out of memory.
    """

    call: RegionCall
    settings: dict[str, Any]
    weights: int
    strategy: int = 0
    was_killed: bool = False
    is_foreseen: bool = False
    calls: int = 0
    is_decoder: bool = False
    lock: Any = None
    not_before: float = 0.0
    found_no_memory: bool = False

    @property
    def key(self) -> str:
        return self.call.region.key

    @property
    def attempt_key(self) -> tuple[str, Shapes]:
        """The key by which strategies are counted. Code for other shapes says nothing about these."""
        return self.key, self.call.shapes

    @property
    def device(self) -> torch.device:
        return self.call.tensors[0].device

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The sort key: foreseen regions last, models before decoders, then by number of calls, most first."""
        return self.is_foreseen, self.is_decoder, -self.calls

    @property
    def hints(self) -> dict[str, int]:
        """The sizes to trace at, by name."""
        return self._general if TRACE_STRATEGIES[self.strategy][0] else self.call.sizes

    @property
    def is_oblivious(self) -> bool:
        return TRACE_STRATEGIES[self.strategy][1]

    @property
    def _general(self) -> dict[str, int]:
        return general_hints(self.call.sizes, self.device)

    def takes_next_strategy(self) -> bool:
        """Advance to the next strategy. Returns False if there is none."""
        self.strategy += 1
        return self.has_strategy

    @property
    def has_strategy(self) -> bool:
        return self.strategy < (AT_SIZES if self.call.sizes == self._general else len(TRACE_STRATEGIES))

    def unlock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()
