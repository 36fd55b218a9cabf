"""The forward that stands in for a transformer block's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)


def test_no_kernel_is_measured_while_it_learns_what_a_block_reads(
    comfy: None, adapter: Callable[[str], ModuleType]
) -> None:
    module = adapter("blocks.transformers.block_forward")
    is_own = adapter("blocks.common").attention.is_eager_attention
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
    *learning, first, second = measures
    assert (any(learning), first, second) == (False, True, True)


@pytest.fixture
def noted(comfy: None, adapter: Callable[[str], ModuleType]) -> Callable[[torch.nn.Module], tuple[Any, list[Any]]]:
    """`noted(block)` returns a new forward for the block, and the list of sites that this one runs."""
    module = adapter("blocks.transformers.block_forward")
    module._learned.cache_clear()

    def stand_in(block: torch.nn.Module) -> tuple[Any, list[Any]]:
        sites: list[Any] = []

        def run(site: Any, *inputs: torch.Tensor) -> Any:
            sites.append(site)
            return site.function(site.module, *inputs)

        return module.RecognisedBlock("blocks.0", block, run, lambda reason: None, "of this test"), sites

    return stand_in


def test_an_argument_as_by_default_makes_no_other_region(noted: Callable[..., Any]) -> None:
    class Block(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, mask: Any = None, flag: bool = False, mode: str = "a", by: int = 1
        ) -> torch.Tensor:
            return x + by if mask is None and not flag else x * 2

    runs, sites = noted(Block())
    for args in ((), (None,), (None, False), (None, False, "a"), (None, False, "a", 1)):
        assert torch.equal(runs(X, *args), X + 1)
    for named in ({"mask": None}, {"by": 1, "flag": False}, {"mode": "a", "mask": None}):
        assert torch.equal(runs(X, **named), X + 1)
    assert len(set(sites)) == 1
    assert torch.equal(runs(X, None, True), X * 2)
    assert len(set(sites)) == 2


TABLES: dict[str, tuple[bool, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "added": (True, lambda x, table: x + table),
    "cast and added": (True, lambda x, table: x * table.to(x.dtype)[..., :1]),
    "summed over its rows": (False, lambda x, table: x + table.sum(0)),
    "by its number of rows": (False, lambda x, table: x + table / table.shape[0]),
    "without the dimension of its rows": (False, lambda x, table: x + table.squeeze(0).unsqueeze(0)),
    "beside the tokens": (False, lambda x, table: torch.cat([x, table], dim=1)),
    "its first row": (True, lambda x, table: x + table[:1]),
    "what it writes": (False, lambda x, table: x.add_(table.sum(0)) * 0 + 1),
    "a little": (False, lambda x, table: x + 1e-3 * table.sum(0)),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_either_of_a_row_for_all_or_a_row_for_each_where_the_block_takes_both(
    noted: Callable[..., Any], name: str, batch: int
) -> None:
    is_either, function = TABLES[name]

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return function(x, table)

    runs, sites = noted(Block())
    x = torch.rand(3, 3, 4)
    for rows in (batch, 1, 3, 2):
        for table in (torch.rand(rows, 3, 4), torch.rand(1, 3, 4)):
            try:
                expected = Block()(x[:rows].clone(), table)
            except RuntimeError:
                continue
            assert torch.equal(runs(x[:rows].clone(), table), expected)
    assert (len({site.dims for site in sites}) == 1) == is_either or name == "beside the tokens"
    if is_either:
        run = sites[0]
        graph = make_fx(lambda *given: run.function(run.module, *given)[0], tracing_mode="symbolic")(x[:2], x[1:])
        for rows in (1, 3):
            assert torch.equal(graph(x, x[:rows] * 2), Block()(x, x[:rows] * 2))
