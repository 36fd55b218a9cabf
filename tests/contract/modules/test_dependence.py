"""A traced graph, cut into a prologue of the time and the rest: which weights are spared, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from compile_cache.modules.dependence import CannotSplitError, Split, split
from compile_cache.torch_compat.private_names import make_fx

W, V = torch.randn(4, 4), torch.randn(4, 4)
X, T, C = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)

Function = Callable[..., Any]


def cut(function: Function, inputs: Sequence[torch.Tensor] = (X, T, C)) -> Split:
    """Of a function of two weights and these inputs, the second of which is the time."""
    traced = make_fx(lambda *given: [function(*given)], tracing_mode="symbolic")(W, V, *inputs)
    return split(traced.graph, 2, [1])


def spared(parts: Split) -> set[str]:
    """The weights that only the prologue reads."""
    return {"wv"[index] for index in set(parts.prologue.weights) - set(parts.rest.weights)}


def results(parts: Split, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the parts give on these inputs."""

    def run(part: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = part.graph(*[(W, V)[index] for index in part.weights], *tensors)
        return found

    kept = run(parts.prologue, inputs[1].clone())
    (result,) = run(parts.rest, *[each.clone() for each in inputs], *kept)
    return result


def test_the_prologue_spares_the_weights_that_only_it_reads() -> None:
    def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
        return x * (t @ w) + (c @ v)

    parts = cut(function)
    assert (parts.prologue.weights, parts.rest.weights) == ((0,), (1,))
    assert torch.equal(results(parts, (X, T, C)), function(W, V, X, T, C))


def test_a_weight_that_the_rest_reads_too_spares_nothing() -> None:
    assert spared(cut(lambda w, v, x, t, c: (x @ w) * (t @ w) + (t @ v))) == {"v"}
    assert spared(cut(lambda w, v, x, t, c: (x @ w) * (t @ w) + x @ v)) == set()


def test_what_follows_the_text_too_is_left_to_the_rest() -> None:
    parts = cut(lambda w, v, x, t, c: x * ((t @ w) * c))
    assert spared(parts) == {"w"}
    assert torch.equal(results(parts, (X, T, C)), X * ((T @ W) * C))


def test_what_has_a_size_of_a_changing_input_is_left_to_the_rest() -> None:
    def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
        return x + (t[:1] @ w).expand(x.shape[0], 4) @ v

    given = (torch.randn(5, 4), T, C)
    parts = cut(function, given)
    assert [tuple(each.shape) for each in parts.results] == [(1, 4)]
    assert parts.rest.weights == (1,)
    assert torch.equal(results(parts, given), function(W, V, *given))


def test_a_size_of_the_time_is_read_from_it_whatever_the_trace_read_it_from() -> None:
    def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
        return x + (t.reshape(t.shape[0], 2, 2).reshape(t.shape[0], 4) @ w)[: t.shape[0]] @ v

    given = (torch.randn(5, 4)[:1], torch.randn(5, 4), C)
    parts = cut(function, given)
    assert spared(parts) == {"w", "v"}
    assert torch.equal(results(parts, given), function(W, V, *given))


@pytest.mark.parametrize("draw", [torch.rand_like, lambda t: torch.nonzero(t).sum()], ids=["random", "shapes"])
def test_what_differs_from_call_to_call_is_left_to_the_rest(draw: Any) -> None:
    def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
        return x * (t @ w) + draw(t) * v[:1]

    parts = cut(function)
    assert (parts.prologue.weights, parts.rest.weights) == ((0,), (1,))
    torch.manual_seed(1)
    found = results(parts, (X, T, C))
    torch.manual_seed(1)
    assert torch.equal(found, function(W, V, X, T, C))


def test_a_constant_keeps_the_region_whole() -> None:
    with pytest.raises(CannotSplitError, match="constant"):
        cut(lambda w, v, x, t, c: x * (t @ w) + torch.tensor([1.0, 2.0, 3.0, 4.0]))


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

        with pytest.raises(CannotSplitError, match="writes to what another part reads"):
            cut(function)

    def test_to_a_view_of_what_a_prologue_made_keep_the_region_whole(self) -> None:
        def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
            made = t @ w
            made[:1].add_(x[:1])
            return made + x

        with pytest.raises(CannotSplitError, match="writes to what another part reads"):
            cut(function)

    def test_to_one_of_several_results_keep_the_region_whole(self) -> None:
        def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
            made = t @ w
            first, _ = made.split(2, dim=1)
            before = x * made
            return before + first.add_(1).sum()

        with pytest.raises(CannotSplitError, match="writes to what another part reads"):
            cut(function)

    def test_by_out_are_seen_where_they_go(self) -> None:
        def function(w: Any, v: Any, x: Any, t: Any, c: Any) -> Any:
            made, other = t @ w, t * 2
            before = x * made
            torch.clamp(other, -1, 1, out=made)
            return before + made

        with pytest.raises(CannotSplitError, match="writes to what another part reads"):
            cut(function)

    def test_to_an_input_keep_the_region_whole(self) -> None:
        with pytest.raises(CannotSplitError, match="writes to what another part reads"):
            cut(lambda w, v, x, t, c: x * (t.add_(1) @ w))
