"""Casts from fp8 on cards whose Triton has no such types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.lower import casts


@pytest.mark.parametrize("turned", [torch.Tensor.t, lambda weight: weight.t().contiguous()])
def test_a_weight_in_fp8_is_dequantized_before_it_is_transposed(monkeypatch: pytest.MonkeyPatch, turned: Any) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    monkeypatch.setattr(casts, "_lacks_fp8", lambda device: True)
    weight, scale = torch.randn(4, 6).to(torch.float8_e4m3fn), torch.tensor(0.5)

    def transposed(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = kitchen.dequantize_per_tensor_fp8(turned(weight), scale, torch.float32)
        return found

    traced = make_fx(transposed, tracing_mode="fake")(weight, scale)
    casts.keep_opaque(traced.graph, torch.device("cuda"))
    traced.graph.eliminate_dead_code()
    order = [node.target._schema.name for node in traced.graph.nodes if node.op == "call_function"]
    assert order == ["comfy_kitchen::dequantize_fp8", "aten::t"]
    traced.recompile()
    assert torch.equal(traced(weight, scale), transposed(weight, scale))
