"""A rehearsal compiles the regions of all states before the first call, which runs once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from compile_cache.regions.site import Hook, RegionSite

from ....rig import TOKENS, Bound, Rig, random, relative_error, seeded


class Part(nn.Module):
    """Adds to its input what it kept of the one before: two states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) if kept[0] is None else self.linear(x) + kept[0]
        kept[0] = y.tanh()
        return y


class Parts(nn.Module):
    """Runs its block over the rows of x one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        kept: list[Any] = [None]
        return torch.cat([self.part(row, kept) for row in x.split(1)])


def _first(part: nn.Module, x: torch.Tensor) -> Any:
    kept: list[Any] = [None]
    return Part.forward(part, x, kept), kept[0].clone()  # type: ignore[arg-type]


def _next(part: nn.Module, x: torch.Tensor, before: torch.Tensor) -> Any:
    kept: list[Any] = [before]
    return Part.forward(part, x, kept), kept[0].clone()  # type: ignore[arg-type]


def _hooks(run: Any, bypass: Any, module: Parts) -> Sequence[Hook]:
    part = module.part
    first = RegionSite("part", "Part.first", part, _first, (TOKENS,))
    later = RegionSite("part", "Part.next", part, _next, (TOKENS, TOKENS))

    def forward(x: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        result: torch.Tensor
        result, kept[0] = run(first, x) if kept[0] is None else run(later, x, kept[0])
        return result

    return [Hook(part, forward, (first, later))]


@pytest.fixture
def module() -> Any:
    return seeded(Parts)


def bound(rig: Rig, module: Parts) -> Bound:
    return rig.bind(module, lambda run, bypass: _hooks(run, bypass, module))


def test_it_compiles_the_states_that_the_first_call_does_not_have(cold: Rig, module: Parts) -> None:
    parts, one = bound(cold, module), random(1, 5, 4)
    with cold.expect(region_compiles=2, verifications=2, region_calls=3, graph_calls=1):
        parts(one, rehearsal=lambda: module(random(2, 3, 4)))
    assert module.calls == 2, "the call ran once, beside its rehearsal"
    with cold.expect(region_calls=3, graph_calls=1, verifications=ANY):
        actual = parts(random(3, 7, 4), rehearsal=lambda: pytest.fail("there is one rehearsal"))
    assert relative_error(actual, module(random(3, 7, 4))) < 1e-4


def test_one_that_fails_costs_nothing_but_itself(cold: Rig, module: Parts) -> None:
    def fail() -> None:
        raise ValueError("a small input is refused")

    with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
        bound(cold, module)(random(1, 5, 4), rehearsal=fail)


def test_a_lack_of_memory_in_it_reaches_the_caller(cold: Rig, module: Parts) -> None:
    def fail() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        bound(cold, module)(random(1, 5, 4), rehearsal=fail)


def test_random_numbers_of_the_prompt_stay_as_they_are(cold: Rig, module: Parts) -> None:
    torch.manual_seed(3)
    bound(cold, module)(random(1, 5, 4), rehearsal=lambda: module(torch.randn(2, 3, 4)))
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))
