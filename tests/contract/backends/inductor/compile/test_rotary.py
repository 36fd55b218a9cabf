"""comfy-kitchen's rotary operators as plain arithmetic: their results, and no operator of theirs in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy_kitchen
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.compile.decompositions import decompositions
from compile_cache.backends.inductor.compile.rotary import BY_NAME, rotated, rotated_halves

from ....rig import random, relative_error

OF_TWO = {"apply_rope", "apply_rope_split_half"}
NAMES = ["apply_rope", "apply_rope1", "apply_rope_split_half", "apply_rope_split_half1"]


def operator(name: str) -> Any:
    return getattr(torch.ops.comfy_kitchen, name).default


def given(
    name: str, tokens: int = 5, of_table: int = 5, by_token: bool = False, dtype: Any = torch.float32
) -> list[Any]:
    x = random(2, 3, tokens, 8).to(dtype)
    k = random(2, 3, tokens, 8, seed=1).to(dtype)
    table = random(2, 1, of_table, 4, 2, 2, seed=2)
    if by_token:
        x, k, table = (each.transpose(1, 2) for each in (x, k, table))
    return [x, k, table] if name in OF_TWO else [x, table]


def both(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str)
def test_the_results_are_the_operators(name: str, by_token: bool, dtype: torch.dtype, tolerance: float) -> None:
    tensors = given(name, by_token=by_token, dtype=dtype)
    expected, actual = both(operator(name)(*tensors)), both(BY_NAME[name](*tensors))
    assert len(actual) == len(expected)
    for one, right in zip(actual, expected, strict=True):
        assert (one.shape, one.dtype) == (right.shape, right.dtype)
        assert relative_error(one, right) <= tolerance


@pytest.mark.parametrize("name", ["apply_rope", "apply_rope1"])
def test_a_table_with_more_tokens_is_cut(name: str) -> None:
    tensors = given(name, of_table=9)
    for one, right in zip(both(BY_NAME[name](*tensors)), both(operator(name)(*tensors)), strict=True):
        assert relative_error(one, right) <= 1e-6


@pytest.mark.parametrize("function", [rotated, rotated_halves])
def test_the_memory_of_the_result_lies_as_that_of_the_input(function: Callable[..., torch.Tensor]) -> None:
    """As comfy-kitchen's fakes say: what follows was traced with those strides."""
    x, table = given("apply_rope1")
    assert function(x, table).stride() == torch.empty_like(x).stride()
    x = random(2, 5, 3, 8).transpose(1, 2)
    assert not x.is_contiguous()
    assert function(x, table).stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("name", NAMES)
def test_no_operator_is_left_in_a_graph_for_inductor(name: str) -> None:
    def run(*tensors: torch.Tensor) -> Any:
        return getattr(comfy_kitchen, name)(*tensors)

    with torch.no_grad():
        traced = make_fx(run, tracing_mode="symbolic")(*given(name))
        graph = make_fx(run, decompositions(), tracing_mode="symbolic")(*given(name))
    assert any("comfy_kitchen" in str(node.target) for node in traced.graph.nodes)
    assert not any("comfy_kitchen" in str(node.target) for node in graph.graph.nodes)
    longer = given(name, tokens=7, of_table=7)
    for one, right in zip(both(graph(*longer)), both(run(*longer)), strict=True):
        assert relative_error(one, right) <= 1e-6
