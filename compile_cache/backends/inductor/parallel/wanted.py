"""A region that a call left to be compiled behind the picture, and the ways in which that is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..compile.tracing import Shapes, general_hints
from ..regions.region import RegionCall

# How a region is traced, in turn, until code comes of it that is right: at general sizes or at those of the call; and
# see `size_one_is_general`.
WAYS = ((True, True), (True, False), (False, True), (False, False))
AT_SIZES = 2


@dataclass(eq=False)
class Wanted:
    """A call that left a region. settings: see `settings_for`, as it ran. weights: how many the block has. way: the
    number of its next one in WAYS. was_killed: a worker ended while it had the region. is_foreseen: no call came to it.
    """

    call: RegionCall
    settings: dict[str, Any]
    weights: int
    way: int = 0
    was_killed: bool = False
    is_foreseen: bool = False

    @property
    def key(self) -> tuple[str, Shapes]:
        return self.call.region.key, self.call.static

    @property
    def device(self) -> torch.device:
        return self.call.tensors[0].device

    @property
    def general(self) -> dict[str, int]:
        return general_hints(self.call.sizes, self.device)

    def goes_another_way(self) -> bool:
        """Go on to the next way. Returns False if there is none."""
        self.way += 1
        return self.way < (AT_SIZES if self.call.sizes == self.general else len(WAYS))
