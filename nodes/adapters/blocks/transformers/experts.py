"""Blocks with a part that picks tokens by their values, as a mixture of experts does: a region before it, one after it.

Neither a trace nor a capture can follow that choice, so the part runs eagerly. Both regions run core's own forward of
the block, with other modules in place of some of its parts, so nothing of core is copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..splice import FixedResult, RecordResult, StopHere, StoppedAt, in_place, other_order
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
    def outside_before(self) -> tuple[str, ...]:
        """The parts that `run_before` does not run."""
        return (self.part, *self.after)

    @property
    def outside_after(self) -> tuple[str, ...]:
        """The parts that `run_after` does not run."""
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


def run_before(block: torch.nn.Module, cut: Cut, forward: Forward) -> tuple[list[Any], torch.Tensor]:
    """Run `forward`, which is the block's, up to the part: the results of the parts before it, and its own input.

    Raises UnusableArgumentError if the block does not call its parts once each, in the order in which it has them.
    """
    noted = {name: RecordResult(block.get_submodule(name)) for name in cut.before}
    try:
        with in_place(block, {**noted, cut.part: StopHere()}):
            forward()
    except StoppedAt as reached:
        results = [value for each in noted.values() for value in each.results]
        if len(results) == len(noted):
            return results, reached.x
    raise other_order()


def run_after(block: torch.nn.Module, cut: Cut, forward: Forward, results: list[Any], made: torch.Tensor) -> Any:
    """Run `forward` with the results of `run_before` and of the part: the block's result.

    What the block computes between the parts it computes once more; of that, a trace keeps what the result needs.
    """
    known = {name: FixedResult(result) for name, result in zip(cut.outside_after, [*results, made], strict=True)}
    with in_place(block, known):
        return forward()


def pass_by(block: torch.nn.Module, cut: Cut, forward: Forward) -> Any:
    """Run `forward` with the part's input in place of its result: to see what the block reads."""
    with in_place(block, {cut.part: torch.nn.Identity()}):
        return forward()
