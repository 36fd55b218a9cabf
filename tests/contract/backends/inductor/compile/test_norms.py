"""A trace finds the results of normalisations by their shapes, and is the one that torch's own arithmetic gives."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.compile import norms
from compile_cache.backends.inductor.compile.tracing import Trace, trace
from compile_cache.regions.site import Dims

from ....rig import FEATURES, TOKENS, Attention, Convolution, inputs, original, seeded, tokens


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
        patch.setattr(norms, "by_shape", contextlib.nullcontext)
        torchs = traced(seeded(module), dims, tensors)
    assert ours.graph.code == torchs.graph.code
    assert list(map(str, ours.guards)) == list(map(str, torchs.guards))
    assert results(ours) == results(torchs)


def test_without_torchs_table_torch_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = traced(seeded(Convolution), (FEATURES,), [torch.zeros(2, 8, 6, 6)])
    monkeypatch.setattr(norms, "fast_fake_results", None)
    assert traced(seeded(Convolution), (FEATURES,), [torch.zeros(2, 8, 6, 6)]).graph.code == ours.graph.code
