"""One compiled artifact of a region, and the sizes for which it may run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from .lowering import Compiled
from .shape_guards import ShapeGuards

Shapes = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Variant:
    """A group of regions has one, unless sizes were met that its assumptions exclude."""

    compiled: Compiled
    assumptions: ShapeGuards
    static: Shapes  # sizes of the dimensions without a name, 0 elsewhere
    used_weights: tuple[int, ...]
    output_spec: pytree.TreeSpec
    shown: set[str] = field(default_factory=set)  # unproven assumptions that a comparison has shown not to matter

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        """Run on all weights of the block, in the order of `weight_slots`, and its inputs."""
        flat = self.compiled([*[weights[index] for index in self.used_weights], *tensors])
        return pytree.tree_unflatten(list(flat), self.output_spec)
