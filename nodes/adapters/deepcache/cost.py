"""The cost of a fast pass relative to a full one, estimated from the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def share_of_fast_pass(unet: Any, depth: int) -> float:
    """The cost of a fast pass at `depth` as a share of a full pass, 0 to 1.

    A layer costs its weights times the area of its feature map, which is a quarter after each downsampling. The part of
    attention that grows with the square of the area is left out.
    """
    inputs, outputs = list(unet.input_blocks), list(unet.output_blocks)
    middle = [] if unet.middle_block is None else [unet.middle_block]
    costs = list(_costs([*inputs, *middle, *outputs]))
    shallow = costs[: depth + 1] + costs[-(depth + 1) :]
    return sum(shallow) / sum(costs)


def _costs(blocks: list[Any]) -> Iterator[float]:
    """The cost of each block, in the order in which they run."""
    area = 1.0
    for block in blocks:
        cost = 0.0
        for layer in block:
            change = _area_factor(layer)
            # A layer that shrinks the map computes on the small one, a layer that enlarges it on the large one.
            area *= change
            cost += area * _weights(layer)
        yield cost


def _area_factor(layer: torch.nn.Module) -> float:
    # A residual block may hold the resampling (`resblock_updown`).
    names = {type(part).__name__ for part in layer.modules()}
    return 0.25 if "Downsample" in names else 4.0 if "Upsample" in names else 1.0


def _weights(layer: Any) -> int:
    """How many weights each pixel is multiplied with. If ComfyUI pages weights, a Linear may have none yet."""
    total = 0
    for part in layer.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim >= 2:
            total += weight.numel()
        elif weight is None and hasattr(part, "in_features"):
            total += int(part.in_features) * int(part.out_features)
    return total
