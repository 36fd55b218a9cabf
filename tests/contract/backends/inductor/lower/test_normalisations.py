"""Normalisations in compiled code: how a trace finds them, and what inductor holds of a row."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.lower import frames, gelu, group_norm, lowering, norms, whole_rows
from compile_cache.backends.inductor.lower.decompositions import POWER, decompositions, of_kitchen
from compile_cache.backends.inductor.lower.group_norm import over_channels
from compile_cache.backends.inductor.lower.tracing import Trace, trace
from compile_cache.modules.site import Dims

from ....rig import FEATURES, TOKENS, Attention, Convolution, inputs, original, random, seeded, tokens

# A trace finds the results of normalisations by their shapes, and is the one that torch's own arithmetic gives.


class Transposed(torch.nn.Module):
    """Normalises what does not lie in order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(0, 1)).transpose(0, 1) * 2


def traced(module: torch.nn.Module, dims: tuple[Dims, ...], tensors: list[torch.Tensor]) -> Trace:
    hints = {name: 17 for names in dims for name in names if name is not None}
    return trace(original, module, tensors, dims, hints)


def results(found: Trace) -> list[Any]:
    """Shape, strides and dtype of each result that the graph uses."""
    values = [node.meta.get("val") for node in found.graph.graph.nodes if node.users]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [(str(tuple(each.shape)), str(each.stride()), each.dtype) for each in tensors]


@pytest.mark.parametrize(
    ("module", "dims", "tensors"),
    [
        (Convolution, (FEATURES,), [torch.zeros(2, 8, 6, 6)]),
        (Attention, Attention.dims, [tokens()[..., :1].expand(2, 5, 16), inputs()[1]]),
        (Transposed, (TOKENS,), [tokens()]),
    ],
)
def test_the_trace_is_the_same(
    monkeypatch: pytest.MonkeyPatch, module: Any, dims: tuple[Dims, ...], tensors: list[torch.Tensor]
) -> None:
    ours = traced(seeded(module), dims, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(norms, "fast_fake_norms", contextlib.nullcontext)
        torchs = traced(seeded(module), dims, tensors)
    assert ours.graph.code == torchs.graph.code
    assert list(map(str, ours.guards)) == list(map(str, torchs.guards))
    assert results(ours) == results(torchs)


def test_without_torchs_table_torch_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = traced(seeded(Convolution), (FEATURES,), [torch.zeros(2, 8, 6, 6)])
    monkeypatch.setattr(norms, "fast_fake_results", None)
    assert traced(seeded(Convolution), (FEATURES,), [torch.zeros(2, 8, 6, 6)]).graph.code == ours.graph.code


# GroupNorm over channels-last memory: the results of torch's own, by a graph that does not divide by the width.


OP = torch.ops.aten.native_group_norm.default


def features(*shape: int) -> torch.Tensor:
    """With another mean in each channel, and a large one: what a sum of squares would get wrong."""
    channels = torch.linspace(-3, 90, shape[1])[:, None, None]
    return (random(*shape) + channels).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(2, 32, 5, 7), (1, 64, 1, 1), (3, 96, 8, 4)], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str
)
def test_it_is_torchs_own(shape: tuple[int, ...], affine: bool, dtype: torch.dtype, tolerance: float) -> None:
    x = features(*shape).to(dtype)
    weight, bias = (random(shape[1]).to(dtype), random(shape[1]).to(dtype)) if affine else (None, None)
    wide = [each if each is None else each.double() for each in (x, weight, bias)]
    expected = torch.native_group_norm(*wide, shape[0], shape[1], shape[2] * shape[3], 32, 1e-5)
    results = over_channels(x, weight, bias, 32, 1e-5)
    assert results[0].is_contiguous(memory_format=torch.channels_last)
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert result.shape == right.shape
        assert (result.double() - right).norm() <= tolerance * right.norm()


def test_an_outlier_costs_the_rest_no_digits() -> None:
    x = features(1, 32, 64, 64) * 0.05
    x[:, :, 0, 0] = -60
    exact = torch.native_group_norm(x.double(), None, None, 1, 32, 64 * 64, 32, 1e-5)[0]
    assert (over_channels(x, None, None, 32, 1e-5)[0].double() - exact).abs().max() < 2e-4


def test_one_image_does_not_reach_another() -> None:
    x = features(2, 32, 4, 4)
    alone = over_channels(x[:1], None, None, 32, 1e-5)[0]
    x[1] = 1e4
    assert torch.equal(over_channels(x, None, None, 32, 1e-5)[0][:1], alone)


def test_elsewhere_torch_has_its_own() -> None:
    table, own = decompositions(), select_decomp_table()
    changed = {op for op in table if table[op] is not own.get(op)}
    assert changed == {OP, POWER, gelu.OPERATOR, frames.CAT, frames.PAD, *of_kitchen()}
    given = (features(2, 32, 3, 2), random(32), None, 2, 32, 6, 8, 1e-5)
    assert all(map(torch.equal, table[OP](*given), own[OP](*given)))


@pytest.mark.parametrize(("channels_last", "reduced"), [(True, [1]), (False, [2, 3])])
def test_a_graph_reads_channels_last_memory_as_it_lies(
    monkeypatch: pytest.MonkeyPatch, channels_last: bool, reduced: list[int]
) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.group_norm(x, 32)

    if channels_last:
        monkeypatch.setattr(group_norm, "region_format", lambda x: torch.channels_last)
    with torch.no_grad():
        graph = make_fx(norm, decompositions(), tracing_mode="symbolic")(features(2, 64, 6, 10))
    assert [node.args[1] for node in graph.graph.nodes if "var_mean" in str(node.target)] == [reduced]
    larger = features(3, 64, 5, 9)
    assert torch.allclose(graph(larger).double(), norm(larger.double()), atol=1e-4)


# Inductor is asked to hold rows of up to 4096 numbers at once: its own choice is only widened.


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours, where inductor itself never holds a row longer than 1024, and a symbol is known to be small by nobody."""

    def known(numbers: Any, limit: int) -> bool:
        return not isinstance(numbers, sympy.Symbol) and int(numbers) <= limit

    def torchs(features: Any, cooperative: bool) -> bool:
        return known(features.reduction_numel, 1024)

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(torchs))
    graph = SimpleNamespace(sizevars=SimpleNamespace(statically_known_leq=known))
    monkeypatch.setattr(whole_rows, "inductor_graphs", SimpleNamespace(graph=graph))
    return whole_rows._choices()


@pytest.mark.parametrize(
    ("numbers", "cooperative", "held"),
    [
        (64, False, True), (1280, False, True), (4096, False, True), (4097, False, False), (64, True, True),
        (1280, True, False), (sympy.Symbol("s"), False, False),
    ],
)  # fmt: skip
def test_rows_up_to_the_limit_are_held(choices: Any, numbers: Any, cooperative: bool, held: bool) -> None:
    features = SimpleNamespace(reduction_numel=numbers)
    assert choices.should_use_persistent_reduction(features, cooperative) is held


def test_a_compile_runs_under_our_choices_and_no_other_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    inner = lowering.compile_fx_inner

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(V.choices)
        return inner(*args, **kwargs)

    monkeypatch.setattr(lowering, "compile_fx_inner", watched)
    norm = torch.nn.LayerNorm(8).requires_grad_(False)
    given = random(2, 3, 8)
    traced = trace(lambda module, x: module(x), norm, [given], [("b", "n", None)], {"b": 17, "n": 3})
    lowering.compile_trace(traced)
    assert seen == [whole_rows._choices()]
    assert type(V.choices) is InductorChoices


def test_without_inductors_classes_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "InductorChoices", None)
    with whole_rows.persistent_reductions():
        assert type(V.choices) is InductorChoices
