"""Results of normalisations in a trace, without their arithmetic.

Torch finds the shapes of a GroupNorm or LayerNorm by running its decomposition on symbols, which takes more than half
of the time of a ResBlock's trace. Shape, strides and dtype are those of the input, but for the statistics.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....regions.slots import swapped
from ....torch_facts.private_names import fast_fake_results

_GROUP, _LAYER = torch.ops.aten.native_group_norm.default, torch.ops.aten.native_layer_norm.default


def by_shape() -> AbstractContextManager[None]:
    """Inside, fake tensors get these results by their shapes alone. Nothing changes where torch keeps no table."""
    if fast_fake_results is None:
        return nullcontext()
    table = fast_fake_results()  # what torch asks before it decomposes
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
