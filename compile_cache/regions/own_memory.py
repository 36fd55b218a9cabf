"""The operator by which a region returns a tensor in memory of its own.

Inductor lets a result be a part of a larger buffer, which then lives as long as the result. What a block carries over
to its next call would keep twice its size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

_NAME = "own_memory"


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that shares no memory, also in compiled code."""
    return operator()(tensor)


@functools.cache
def operator() -> Callable[[torch.Tensor], torch.Tensor]:
    """`torch.ops.resolute.own_memory`. It must be there before a graph with it is loaded.

    The first copy of this pack in a process defines it.
    """
    if not hasattr(torch.ops.resolute, _NAME):
        # Any layout will do: inductor need not copy a part of a buffer for it.
        torch.library.define(f"resolute::{_NAME}", "(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
        torch.library.impl(f"resolute::{_NAME}", ("cpu", "cuda"), _copied)
        torch.library.register_fake(f"resolute::{_NAME}", _copied)
    found: Callable[[torch.Tensor], torch.Tensor] = torch.ops.resolute.own_memory.default
    return found


def _copied(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x)
