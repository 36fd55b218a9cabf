"""Blocks with a part that picks tokens by their values, as a mixture of experts does: a region before it, one after it.

Neither a trace nor a capture can follow that choice, so the part runs as it is. Both regions run core's own forward of
the block, with other modules in place of some of its parts, so nothing of core is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import UnusableArgumentError
from .catalogue import is_routed

Forward = Callable[[], Any]


@dataclass(frozen=True)
class Cut:
    """Where a block is cut, as names of modules inside it.

    part: the one that picks tokens. before, after: the parts with weights that the block has before it and after it.
    """

    part: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def not_entered(self) -> tuple[str, ...]:
        """What runs after `enter`."""
        return (self.part, *self.after)

    @property
    def not_left(self) -> tuple[str, ...]:
        """What runs before `leave`."""
        return (*self.before, self.part)


def cut_of(block: torch.nn.Module) -> Cut | None:
    """None for a block without such a part, and for one with more than one."""
    found = [name for name, part in block.named_modules() if is_routed(type(part))]
    if len(found) != 1:
        return None
    parent, _, own = found[0].rpartition(".")
    beside = list(block.get_submodule(parent).named_children())
    names = [name for name, _ in beside]
    inside = f"{parent}." if parent else ""
    weighty = [name for name, part in beside if name == own or any(True for _ in part.parameters())]
    before = tuple(f"{inside}{name}" for name in weighty if names.index(name) < names.index(own))
    after = tuple(f"{inside}{name}" for name in weighty if names.index(name) > names.index(own))
    return Cut(found[0], before, after)


def enter(block: torch.nn.Module, cut: Cut, forward: Forward) -> tuple[list[Any], torch.Tensor]:
    """Run `forward`, which is the block's, up to the part: the results of the parts before it, and its own input.

    Raises UnusableArgumentError if the block does not call its parts once each, in the order in which it has them.
    """
    noted = {name: _Noted(block.get_submodule(name)) for name in cut.before}
    try:
        with _in_place(block, {**noted, cut.part: _Stop()}):
            forward()
    except _Reached as reached:
        results = [value for each in noted.values() for value in each.results]
        if len(results) == len(noted):
            return results, reached.x
    raise _other_order()


def leave(block: torch.nn.Module, cut: Cut, forward: Forward, results: list[Any], made: torch.Tensor) -> Any:
    """Run `forward` with the results of `enter` and of the part: the block's result.

    What the block computes between the parts it computes once more; of that, a trace keeps what the result needs.
    """
    known = {name: _Known(result) for name, result in zip(cut.not_left, [*results, made], strict=True)}
    with _in_place(block, known):
        return forward()


def pass_by(block: torch.nn.Module, cut: Cut, forward: Forward) -> Any:
    """Run `forward` with the part's input in place of its result: to see what the block reads."""
    with _in_place(block, {cut.part: torch.nn.Identity()}):
        return forward()


class _Reached(Exception):
    """Carries the part's input out of core's forward."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__("reached the part that picks tokens")
        self.x = x


class _Stop(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise _Reached(x)


class _Noted(torch.nn.Module):
    """Runs a part, and keeps its results."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.results.append(self.part(*args, **kwargs))
        return self.results[-1]


class _Known(torch.nn.Module):
    """Has the result of a part, for one call."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.results = [result]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.results:
            raise _other_order()
        return self.results.pop()


def _other_order() -> UnusableArgumentError:
    return UnusableArgumentError("it does not call its parts once each, in the order in which it has them")


@contextmanager
def _in_place(block: torch.nn.Module, others: Mapping[str, torch.nn.Module]) -> Iterator[None]:
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
