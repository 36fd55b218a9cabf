"""Whether a compiled region gives what its original gives, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ....regions.region import RegionSite
from ..compile.environment import tf32_convolution, tf32_matmul
from ..compile.variant import Variant

# Relative error between a region and its original that rounding explains, by dtype of the result.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TF32_TOLERANCE = 5e-3  # float32 on NVIDIA, where convolutions round their inputs to 10 bits unless told otherwise

# What is left where a block's inputs cancel out is rounding, and no two ways of computing it have that in common. As a
# part of the inputs: a normalisation of equal values divides each rounding by the root of its 1e-6.
_NOISE = 1000 * torch.finfo(torch.float32).eps


def disagreement(
    variant: Variant,
    site: RegionSite,
    weights: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    cancellations: tuple[type[BaseException], ...] = (),
) -> str | None:
    """None where the artifact agrees with the original on this input, else what is wrong.

    Raises what the original raises, what cancels, and OutOfMemoryError, which tells nothing of the artifact.
    """
    expected = pytree.tree_leaves(original(site, tensors))
    with torch.no_grad():
        try:
            actual = pytree.tree_leaves(variant(weights, tensors))
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, (torch.cuda.OutOfMemoryError, *cancellations)):
                raise
            return f"it fails: {error}"
    noise = max(float(_norm(tensor)) for tensor in tensors) * _NOISE
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        finite = torch.isfinite(b)  # a model that overflows does so in either way of computing it
        scale = _norm(b)
        error_norm = (a[finite].float() - b[finite].float()).norm()
        if not bool(error_norm <= _tolerance(b) * scale + noise):
            return f"error {float(error_norm):.3g} at norm {float(scale):.3g}"
    return None


def original(site: RegionSite, tensors: Sequence[torch.Tensor]) -> Any:
    """What the block's own code gives; `tensors` stay as they are."""
    with torch.no_grad():
        return site.function(site.module, *[tensor.clone() for tensor in tensors])


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Of what is finite."""
    norm: torch.Tensor = tensor[torch.isfinite(tensor)].float().norm()
    return norm


def _tolerance(result: torch.Tensor) -> float:
    if result.is_cuda and result.dtype is torch.float32 and (tf32_matmul() or tf32_convolution()):
        return _TF32_TOLERANCE
    return _TOLERANCE.get(result.dtype, _TOLERANCE[torch.float32])
