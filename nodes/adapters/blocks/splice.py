"""Modules that stand in for parts of a block, so that a region can run a share of core's own forward of the block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .common import UnusableArgumentError


class Reached(Exception):
    """Carries the arguments of a part out of core's forward."""

    def __init__(self, x: torch.Tensor, context: Any) -> None:
        super().__init__("reached the part at which a region ends")
        self.x = x
        self.context = context


class Stop(torch.nn.Module):
    """Ends the forward. Raises Reached."""

    def forward(self, x: torch.Tensor, context: Any = None, transformer_options: Any = None) -> torch.Tensor:
        raise Reached(x, context)


class Noted(torch.nn.Module):
    """Runs a part, and keeps its results."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.results.append(self.part(*args, **kwargs))
        return self.results[-1]


class Known(torch.nn.Module):
    """Has the result of a part, for one call. Raises UnusableArgumentError in a second one."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.results = [result]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.results:
            raise other_order()
        return self.results.pop()


def other_order() -> UnusableArgumentError:
    return UnusableArgumentError("it does not call its parts once each, in the order in which it has them")


@contextmanager
def in_place(block: torch.nn.Module, others: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """With other modules in place of those with these names."""
    slots = []
    for name in others:
        parent, _, own = name.rpartition(".")
        slots.append((block.get_submodule(parent)._modules, own))
    before = [modules[own] for modules, own in slots]
    for (modules, own), other in zip(slots, others.values(), strict=True):
        modules[own] = other
    try:
        yield
    finally:
        for (modules, own), part in zip(slots, before, strict=True):
            modules[own] = part
