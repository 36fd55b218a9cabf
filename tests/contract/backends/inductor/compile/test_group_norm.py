"""GroupNorm over channels-last memory: the results of torch's own, by a graph that does not divide by the width."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.compile import frames, gelu, group_norm
from compile_cache.backends.inductor.compile.decompositions import decompositions, of_kitchen
from compile_cache.backends.inductor.compile.group_norm import over_channels

from ....rig import random

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
    assert changed == {OP, gelu.OPERATOR, frames.CAT, frames.PAD, *of_kitchen()}
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
