"""GroupNorm over channels-last memory: torch's own results, and in a graph without divisions by a width."""

from __future__ import annotations

import pytest
import torch

from compile_cache.backends.inductor import tracing
from compile_cache.backends.inductor.assumptions import Assumptions, Verdict
from compile_cache.backends.inductor.group_norm import native_group_norm, over_channels
from compile_cache.backends.inductor.tracing import trace

from .rig import random

FEATURES = ("b", None, "h", "w")


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


def test_one_image_does_not_reach_another() -> None:
    x = features(2, 32, 4, 4)
    alone = over_channels(x[:1], None, None, 32, 1e-5)[0]
    x[1] = 1e4
    assert torch.equal(over_channels(x, None, None, 32, 1e-5)[0][:1], alone)


def test_elsewhere_torch_has_its_own() -> None:
    on_cpu = features(1, 32, 2, 2)
    assert native_group_norm(on_cpu, None, None, 1, 32, 4, 32, 1e-5) is NotImplemented


def test_a_trace_has_it_with_every_size_a_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {torch.ops.aten.native_group_norm.default: lambda x, w, b, *sizes: over_channels(x, w, b, *sizes[-2:])}
    monkeypatch.setattr(tracing, "_DECOMPOSITIONS", table)
    norm = torch.nn.GroupNorm(32, 64)
    traced = trace(lambda module, x: module(x), norm, [features(2, 64, 6, 10)], (FEATURES,), {"b": 2, "h": 6, "w": 10})
    names = {str(node.target) for node in traced.graph.graph.nodes}
    assert any("var_mean" in name for name in names)
    assert not any("group_norm" in name for name in names)
    verdict, _ = Assumptions(traced.assumptions, traced.symbols).check({"b": 3, "h": 5, "w": 9})
    assert verdict is Verdict.HOLDS
    x = features(3, 64, 5, 9)
    (result,) = traced.graph(norm.weight, norm.bias, x)
    right = norm.double()(x.double())
    assert (result - right).norm() <= 1e-5 * right.norm()
