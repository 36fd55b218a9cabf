"""Changes of settings within one sampling run are noticed, and named."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.code_identity.reach import ReachCache


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.gain, self.scale = [1, 2], 2.0, torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.scale + sum(self.sizes)


@pytest.fixture
def blocks() -> nn.Sequential:
    return nn.Sequential(Block(), nn.SiLU(), Block())


@pytest.fixture
def watch(adapter: Callable[[str], ModuleType], comfy: None, blocks: nn.Sequential) -> Any:
    modules = list(blocks.modules())
    made = adapter("module_state.module_snapshot").ModuleSnapshot(modules)
    made.watch(modules, ReachCache().of({*map(type, modules)}))
    return made


def test_a_method_that_is_bound_again_is_no_change_and_one_of_another_object_is(
    adapter: Callable[[str], ModuleType], comfy: None, blocks: nn.Sequential
) -> None:
    class Beside:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def put(beside: Any) -> None:
        blocks[0].forward = beside.forward

    first, bound = Beside(), []
    put(first)
    modules = list(blocks.modules())
    made = adapter("module_state.module_snapshot").ModuleSnapshot(modules)
    made.watch(modules, ReachCache().of({*map(type, modules)}))
    bound.append(blocks[0].forward)  # alive, so that the next one has another address
    put(first)
    assert made.change() == ""
    put(Beside())
    assert made.change() == "forward of Block"


CHANGES: dict[str, Callable[[Any], object]] = {
    "gain": lambda block: setattr(block, "gain", 3.0),
    "sizes": lambda block: block.sizes.append(3),
    "scale": lambda block: setattr(block, "scale", torch.zeros(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_is_named(watch: Any, blocks: Any, name: str) -> None:
    CHANGES[name](blocks[2])
    assert watch.change() == f"{name} of Block"


def test_a_setting_that_is_gone_is_named(watch: Any, blocks: Any) -> None:
    del blocks[0].gain
    assert watch.change() == "gain of Block"


def test_an_equal_list_in_the_place_of_another_is_no_change(watch: Any, blocks: Any) -> None:
    """As OneFlow's compiler leaves them."""
    blocks[0].sizes = list(blocks[0].sizes)
    assert watch.change() == ""
