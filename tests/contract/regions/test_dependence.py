"""A traced graph, cut into a prologue of the time and the rest: which weights are spared, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from compile_cache.regions.dependence import SIZE, TIME, Split, StaysWholeError, split
from compile_cache.torch_facts.private_names import make_fx

W, V = torch.randn(4, 4), torch.randn(4, 4)
X, T, C = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
STEADY = ("", TIME, "")

Function = Callable[..., Any]


def cut(function: Function, inputs: Sequence[torch.Tensor] = (X, T, C), steady: Sequence[str] = STEADY) -> Split:
    """Of a function of two weights and these inputs."""
    traced = make_fx(lambda *given: [function(*given)], tracing_mode="symbolic")(W, V, *inputs)
    return split(traced.graph, ["w", "v"], steady)


def results(parts: Split, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the parts give on these inputs, with NaN in place of each weight that a part does not read."""

    def run(part: Any, *more: torch.Tensor) -> list[torch.Tensor]:
        weights = [(W, V)[index] for index in part.weights]
        found: list[torch.Tensor] = part.graph(*weights, *[inputs[index].clone() for index in part.inputs], *more)
        return found

    (result,) = run(parts.rest, *run(parts.prologue))
    return result


def test_the_prologue_spares_the_weights_that_only_it_reads() -> None:
    def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
        return x * (t @ w) + (c @ v)

    parts = cut(function)
    assert (parts.groups, parts.prologue.weights, parts.rest.weights) == ({"w"}, (0,), (1,))
    assert torch.equal(results(parts, (X, T, C)), function(W, V, X, T, C))


def test_a_weight_that_the_rest_reads_too_spares_nothing() -> None:
    assert cut(lambda w, v, x, t, c: (x @ w) * (t @ w) + (t @ v)).groups == {"v"}
    with pytest.raises(StaysWholeError, match="no weights serve the time alone"):
        cut(lambda w, v, x, t, c: (x @ w) * (t @ w) + x @ v)


def test_a_weight_that_cannot_be_left_out_spares_nothing() -> None:
    traced = make_fx(lambda w, v, x, t, c: [x * (t @ w)], tracing_mode="symbolic")(W, V, X, T, C)
    with pytest.raises(StaysWholeError, match="no weights"):
        split(traced.graph, [None, None], STEADY)


def test_what_follows_the_text_too_is_left_to_the_rest() -> None:
    parts = cut(lambda w, v, x, t, c: x * ((t @ w) * c))
    assert parts.groups == {"w"}
    assert torch.equal(results(parts, (X, T, C)), X * ((T @ W) * C))


def test_what_has_a_size_of_a_changing_input_is_left_to_the_rest() -> None:
    def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
        return x + (t[:1] @ w).expand(x.shape[0], 4) @ v

    given = (torch.randn(5, 4), T, C)
    parts = cut(function, given)
    assert [tuple(each.shape) for each in parts.results] == [(1, 4)]
    assert parts.rest.weights == (1,)
    assert torch.equal(results(parts, given), function(W, V, *given))


def test_an_input_of_sizes_alone_may_cut_what_a_prologue_reads() -> None:
    number = torch.empty(2, 0)

    def function(w: Any, v: Any, x: Any, t: Any, n: Any) -> Any:
        return x[: n.shape[0]] * (t[: n.shape[0]] @ w) @ v

    parts = cut(function, (X, T, number), ("", TIME, SIZE))
    assert parts.prologue.inputs == (1, 2)
    assert torch.equal(results(parts, (X, T, number)), function(W, V, X, T, number))


def test_random_numbers_keep_the_region_whole() -> None:
    with pytest.raises(StaysWholeError, match="nondeterministic_seeded"):
        cut(lambda w, v, x, t, c: x * (t @ w) + torch.rand_like(x))


def test_shapes_that_depend_on_values_keep_the_region_whole() -> None:
    with pytest.raises(StaysWholeError, match="dynamic_output_shape"):
        cut(lambda w, v, x, t, c: x * (t @ w) + torch.nonzero(x).sum())


def test_attention_without_dropout_draws_nothing() -> None:
    q = torch.randn(1, 1, 3, 4)

    def function(w: Any, v: Any, q: Any, t: Any, c: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q) * (t @ w)

    with torch.no_grad():
        assert cut(function, (q, T, C)).groups == {"w"}


class TestWrites:
    def test_to_what_only_one_part_makes_and_reads_are_cut_with_it(self) -> None:
        def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
            return (x * 2).add_(1) * (t @ w).add_(1).rsqrt()

        parts = cut(function, (X, T.abs(), C))
        given = (X, T.abs(), C)
        assert torch.equal(results(parts, given).nan_to_num(), function(W, V, *given).nan_to_num())

    def test_to_what_a_prologue_made_keep_the_region_whole(self) -> None:
        def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
            made = t @ w
            before = x * made
            return before + made.add_(1)

        with pytest.raises(StaysWholeError, match="writes to what another part reads"):
            cut(function)

    def test_to_a_view_of_what_a_prologue_made_keep_the_region_whole(self) -> None:
        def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
            made = t @ w
            made[:1].add_(x[:1])
            return made + x

        with pytest.raises(StaysWholeError, match="writes to what another part reads"):
            cut(function)

    def test_to_an_input_keep_the_region_whole(self) -> None:
        with pytest.raises(StaysWholeError, match="writes to what another part reads"):
            cut(lambda w, v, x, t, c: x * (t.add_(1) @ w))
