"""The forward that stands in for a transformer block's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)


def test_no_kernel_is_measured_while_it_learns_what_a_block_reads(
    comfy: None, adapter: Callable[[str], ModuleType]
) -> None:
    module = adapter("blocks.transformers.block_forward")
    is_own = adapter("blocks.common").attention.is_of_the_blocks
    measures: list[bool] = []

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            measures.append(not is_own())
            return x + 1

    def run(site: Any, *inputs: torch.Tensor) -> Any:
        return site.function(site.module, *inputs)

    block = module.RecognisedBlock("blocks.0", Block(), run, lambda reason: None, "of this test")
    for _ in range(2):
        assert torch.equal(block(X), X + 1)
    assert measures == [False, True, True]
