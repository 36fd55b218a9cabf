"""A block with a part that picks tokens by their values is cut there: what is before it and what is after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_cache.regions.structure import parts


class Experts(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x > 0] *= 2
        return x


class Inner(torch.nn.Module):
    """Parts in the order in which `forward` calls them, unless `order` says otherwise."""

    def __init__(self, order: str = "") -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4, elementwise_affine=False)
        self.attention = torch.nn.Linear(4, 4)
        self.experts = Experts()
        self.last = torch.nn.Linear(4, 4)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.last(x) if self.order == "last first" else self.gate(x)
        x = x + gate * self.attention(self.norm(x))
        if self.order == "attention twice":
            x = self.attention(x)
        if self.order == "never":
            return x
        made = self.experts(self.norm(x))
        if self.order == "gate again":
            gate = self.gate(made)
        return x + gate * self.last(made)


class Block(torch.nn.Module):
    def __init__(self, order: str = "") -> None:
        super().__init__()
        self.block = Inner(order)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)


@pytest.fixture
def routed(adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = adapter("blocks.transformers.experts")
    monkeypatch.setattr(module, "is_routed", lambda kind: kind is Experts)
    return module


def apart(routed: ModuleType, block: Block) -> Any:
    cut, forward = routed.cut_of(block), functools.partial(block.forward, X)
    results, x = routed.run_before(block, cut, forward)
    return routed.run_after(block, cut, forward, results, block.block.experts(x))


def test_it_is_cut_at_the_part(routed: ModuleType) -> None:
    cut = routed.cut_of(Block())
    assert cut.before == ("block.gate", "block.attention")  # what has no weights is computed on both sides
    assert (cut.part, cut.after) == ("block.experts", ("block.last",))
    assert routed.cut_of(torch.nn.Sequential(Block(), Block())) is None
    assert routed.cut_of(torch.nn.Linear(4, 4)) is None


def test_neither_side_needs_the_weights_of_the_other(routed: ModuleType) -> None:
    block, cut = Block(), routed.cut_of(Block())
    sides = [{name for name, _ in parts(block, each)} for each in (cut.outside_before, cut.outside_after)]
    assert sides[0] & sides[1] == {"", "block", "block.norm"}
    assert sides[0] | sides[1] == {name for name, _ in block.named_modules()} - {"block.experts"}


def test_both_sides_give_what_the_block_gives(routed: ModuleType) -> None:
    block = Block()
    before = dict(block.named_modules())
    assert torch.equal(apart(routed, block), block(X))
    assert dict(block.named_modules()) == before


@pytest.mark.parametrize("order", ["never", "attention twice", "gate again"])
def test_a_block_with_its_parts_in_another_order_is_refused(routed: ModuleType, order: str) -> None:
    block = Block(order)
    before = dict(block.named_modules())
    with pytest.raises(Exception, match="does not call its parts once each"):
        apart(routed, block)
    assert dict(block.named_modules()) == before


def test_a_part_after_the_cut_may_not_run_before_it(routed: ModuleType) -> None:
    # Its weights are no inputs of the first region; without the gate, the block is refused.
    with pytest.raises(Exception, match="does not call its parts once each"):
        apart(routed, Block("last first"))
