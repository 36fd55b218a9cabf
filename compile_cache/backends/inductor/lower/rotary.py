"""comfy-kitchen's rotary operators as plain arithmetic, which inductor fuses with the norm before them.

As an opaque operator each one is a separate kernel, which reads and writes all queries and keys once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Multiply each pair of neighbours in the last dimension of x by its 2x2 rotation matrix.

    x: (batch, heads, tokens, width), or (batch, tokens, heads, width). frequencies: six dimensions, three that
    broadcast to x, then (width / 2, 2, 2); surplus tokens are dropped. Computes in the dtype of frequencies.
    """
    pairs = x.to(frequencies.dtype).reshape(*x.shape[:-1], -1, 2)
    matrices = _trimmed(x, frequencies)
    own, others = (each.diagonal(dim1=-2, dim2=-1) for each in (matrices, matrices.flip(-1)))
    return (pairs * own + pairs.flip(-1) * others).reshape(x.shape).to(x.dtype)


def rotated_halves(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Like `rotated`, but pairs each element with its counterpart in the other half, and drops no surplus tokens."""
    own = torch.cat((frequencies[..., 0, 0], frequencies[..., 1, 1]), dim=-1)
    others = torch.cat((frequencies[..., 0, 1], frequencies[..., 1, 0]), dim=-1)
    exact = x.to(frequencies.dtype)
    return (exact * own + exact.roll(x.shape[-1] // 2, -1) * others).to(x.dtype)


def _trimmed(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    tokens = x.shape[2] if x.ndim > 2 else 1
    if frequencies.ndim > 2 and tokens != 1 and frequencies.shape[2] > tokens:
        return frequencies[:, :, :tokens]
    return frequencies


def _both(of_one: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda q, k, frequencies: (of_one(q, frequencies), of_one(k, frequencies))


BY_NAME: dict[str, Callable[..., Any]] = {
    "apply_rope": _both(rotated),
    "apply_rope1": rotated,
    "apply_rope_split_half": _both(rotated_halves),
    "apply_rope_split_half1": rotated_halves,
}
