"""Plain fp8 weights on a card whose compiler has no such types."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_cache.backends.inductor.compile import casts
from compile_cache.backends.inductor.compile.artifacts import pack, unpack
from compile_cache.backends.inductor.compile.lowering import compile_trace
from compile_cache.backends.inductor.compile.tracing import trace
from compile_cache.regions.region_weights import weight_inputs, weight_slots

WIDTH = 64


class Linear(nn.Module):
    """Casts its weight before use, as ComfyUI does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def operators(module: nn.Module) -> tuple[set[str], object]:
    x = torch.randn(5, WIDTH, dtype=torch.bfloat16)
    made = trace(lambda each, x: type(each).forward(each, x), module, [x], [("n", None)], {"n": 5})
    return {str(node.target) for node in made.graph.graph.nodes if node.op == "call_function"}, made


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_such_weights_are_cast_by_one_operator(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(casts, "_lacks_fp8", lambda device: True)
    module = Linear(dtype)
    with torch.no_grad():
        found, made = operators(module)
        assert "resolute.cast_from_fp8.default" in found
        region = unpack(pack("key", "Linear", compile_trace(made, keep=True)))  # type: ignore[arg-type]
        assert region.graph is not None
        assert "Float8" not in region.graph.source_code, "the type in generated code"
        for rows in (5, 9, 1):
            x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
            torch.testing.assert_close(region(weight_inputs(weight_slots(module)), [x]), module(x))


def test_elsewhere_and_for_other_weights_a_cast_stays_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        assert "resolute.cast_from_fp8.default" not in operators(Linear(torch.float8_e4m3fn))[0]
        monkeypatch.setattr(casts, "_lacks_fp8", lambda device: True)
        assert "resolute.cast_from_fp8.default" not in operators(Linear(torch.float16))[0]


@pytest.mark.parametrize(("capability", "lacks"), [((7, 5), True), ((8, 6), True), ((8, 9), False), ((12, 0), False)])
def test_cards_before_ada_lack_fp8(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], lacks: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert casts._lacks_fp8(torch.device("cuda", 0)) is lacks
    assert not casts._lacks_fp8(torch.device("cpu"))
