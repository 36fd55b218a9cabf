"""Modules that replace parts of a block, so that a region can run a share of core's own forward of the block."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....compile_cache.modules.slots import swapped
from .common import UnusableArgumentError


class StoppedAt(Exception):
    """Ends core's forward at the part where a region ends, and carries the arguments of that part."""

    def __init__(self, x: torch.Tensor, context: Any) -> None:
        super().__init__("reached the part at which a region ends")
        self.x = x
        self.context = context


class StopHere(torch.nn.Module):
    """Ends the forward. Raises StoppedAt."""

    def forward(self, x: torch.Tensor, context: Any = None, transformer_options: Any = None) -> torch.Tensor:
        raise StoppedAt(x, context)


class FixedResult(torch.nn.Module):
    """Returns a fixed result in place of a part's, for one call. Raises UnusableArgumentError on a second call."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.results = [result]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.results:
            raise UnusableArgumentError("it does not call its parts once each, in the order in which it has them")
        return self.results.pop()


def replaced_parts(block: torch.nn.Module, others: Mapping[str, torch.nn.Module]) -> AbstractContextManager[None]:
    """Context that replaces the block's modules of these names with other modules."""
    places = [(name.rpartition("."), other) for name, other in others.items()]
    return swapped((block.get_submodule(parent)._modules, own, other) for (parent, _, own), other in places)
