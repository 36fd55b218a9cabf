"""A region that a call left to be compiled, and the ways in which that is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..compile.tracing import Shapes, general_hints
from ..regions.region import RegionCall

# How a region is traced, in turn, until code comes of it that is right: at general sizes or at those of the call; and
# see `size_one_is_general`.
TRACE_STRATEGIES = ((True, True), (True, False), (False, True), (False, False))
AT_SIZES = 2  # the first strategy at the sizes of the call


@dataclass(eq=False)
class CompileTask:
    """A copy of a call that came to a region without code.

    settings: see `settings_for`, as it ran. weights: how many the block has. strategy: the number of the next one.
    was_killed: a worker ended while it had the region. is_foreseen: no call came to it. calls: how many did.
    is_decoder: of a VAE, which runs once where a model runs in each step. lock: no other process compiles the region
    meanwhile. look_at: not before. found_no_memory: its latest compile did.
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
    look_at: float = 0.0
    found_no_memory: bool = False

    @property
    def key(self) -> str:
        return self.call.region.key

    @property
    def attempt_key(self) -> tuple[str, Shapes]:
        """Strategies are counted for a region and the sizes that are no dimensions of its code."""
        return self.key, self.call.static

    @property
    def device(self) -> torch.device:
        return self.call.tensors[0].device

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Models before decoders, and what is called most before the rest."""
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
        """Returns False if there is none."""
        self.strategy += 1
        return self.has_strategy

    @property
    def has_strategy(self) -> bool:
        return self.strategy < (AT_SIZES if self.call.sizes == self._general else len(TRACE_STRATEGIES))

    def unlock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()
