"""A decomposition of GroupNorm for channels-last memory, see `decompositions`.

Torch's decomposition reshapes to (batch, groups, channels per group * height * width). In channels-last memory this is
neither contiguous nor a simple index, so inductor's kernels divide by the symbolic width for every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ....torch_compat.private_names import computation_dtype
from .tracing import region_format

OPERATOR = torch.ops.aten.native_group_norm.default


def by_format(elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The table's decomposition: `over_channels` if the tensor's `region_format` is channels-last, else `elsewhere`."""

    def native_group_norm(x: torch.Tensor, weight: Any, bias: Any, *sizes: Any) -> Any:
        if region_format(x) is torch.contiguous_format:
            return elsewhere(x, weight, bias, *sizes)
        *_, groups, eps = sizes
        return over_channels(x, weight, bias, groups, eps)

    return native_group_norm


def over_channels(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """GroupNorm of x (batch, channels, ..., height, width), computed from per-channel statistics.

    Returns what `aten.native_group_norm` returns: the normalised x in channels-last memory, and the means and the
    reciprocal standard deviations, both (batch, groups).

    Channel statistics read the memory in order. All channels have the same number of pixels, so the variance of a group
    is the mean over its channels of (channel variance + (channel mean - group mean)^2), the law of total variance.
    Sums of squares would be faster, but lose small values beside an outlier.
    """
    batch, channels, *sizes = x.shape
    own, count = channels // groups, math.prod(sizes)
    pixels = x.movedim(1, -1).reshape(batch, count, channels).to(computation_dtype(x.dtype))
    variances, means = (
        of_channels.view(batch, groups, own) for of_channels in torch.var_mean(pixels, dim=1, correction=0)
    )
    mean = means.mean(-1, keepdim=True)
    variance = (variances + (means - mean).square()).mean(-1, keepdim=True)
    deviation = torch.rsqrt(variance + eps)
    scale = deviation.expand(batch, groups, own)
    if weight is not None:
        scale = scale * weight.view(groups, own)
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias.view(groups, own)
    scale, shift = _materialized(scale), _materialized(shift)
    normal = pixels * scale.view(batch, 1, channels) + shift.view(batch, 1, channels)
    result = normal.to(x.dtype).reshape(batch, *sizes, channels).movedim(-1, 1)
    return result, mean[..., 0].to(x.dtype), deviation[..., 0].to(x.dtype)


def _materialized(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, materialized in memory. Otherwise inductor recomputes them for each pixel, in a kernel with so
    many reads that it writes an fp32 result by channels, which another kernel then converts to channels-last.
    """
    numbers = numbers.contiguous()
    return numbers.as_strided(numbers.shape, numbers.stride())
