"""A Triton kernel as another package has it: launched with tensors. Triton reads its source from this file."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _doubled(x, out, count: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, count)
    tl.store(out + index, tl.load(x + index) * 2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor of a power of two of elements."""
    out = torch.empty_like(x)
    _doubled[1,](x, out, x.numel())
    return out
