"""Fake results of normalisations in a trace, without running their decompositions.

Torch infers the result shapes of a GroupNorm or LayerNorm by running its decomposition on symbols, which takes more
than half of a ResBlock's trace time. The result has the input's shape, strides and dtype, except for the statistics.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....modules.slots import swapped
from ....torch_compat.private_names import fast_fake_results

_GROUP, _LAYER = torch.ops.aten.native_group_norm.default, torch.ops.aten.native_layer_norm.default


def fast_fake_norms() -> AbstractContextManager[None]:
    """In this block, fake tensors get these results from their shapes alone. No effect if this torch has no table."""
    if fast_fake_results is None:
        return nullcontext()
    table = fast_fake_results()  # torch consults the table before it runs a decomposition
    return swapped([(table, _GROUP, _group_norm), (table, _LAYER, _layer_norm)])


def _group_norm(mode: Any, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    _, _, batch, _, _, groups, _ = rest
    with mode:
        return torch.empty_like(x), x.new_empty((batch, groups)), x.new_empty((batch, groups))


def _layer_norm(mode: Any, x: torch.Tensor, shape: list[int], *rest: Any) -> tuple[torch.Tensor, ...]:
    outer = x.shape[: x.ndim - len(shape)]
    dtype = torch.float32 if x.is_cuda else x.dtype
    with mode:
        mean, deviation = (x.new_empty((*outer, *[1] * len(shape)), dtype=dtype) for _ in range(2))
        return x.new_empty(x.shape), mean, deviation
