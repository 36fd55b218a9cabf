"""The operator by which a region returns a tensor in separate memory.

Inductor may make a result part of a larger buffer, which then lives as long as the result. A tensor that a block keeps
for its next call would keep twice its size alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..torch_compat.operators import defined


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that shares no memory, also in compiled code."""
    return operator()(tensor)


@functools.cache
def operator() -> Callable[[torch.Tensor], torch.Tensor]:
    """`torch.ops.resolute.own_memory`."""
    # Any layout will do: inductor need not copy a part of a buffer for it.
    return defined("own_memory", "(Tensor x) -> Tensor", _copied, _copied, tags=(torch.Tag.flexible_layout,))


def _copied(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x)
