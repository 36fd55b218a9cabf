"""Operations on single numbers in a trace: the results of those that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy_kitchen
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.lower import casts
from compile_cache.backends.inductor.lower.artifacts import pack, unpack
from compile_cache.backends.inductor.lower.decompositions import decompositions
from compile_cache.backends.inductor.lower.gelu import by_sigmoid
from compile_cache.backends.inductor.lower.lowering import compile_trace
from compile_cache.backends.inductor.lower.nearest import ByIndex
from compile_cache.backends.inductor.lower.rotary import BY_NAME, rotated, rotated_halves
from compile_cache.backends.inductor.lower.tracing import trace
from compile_cache.modules.region_weights import weight_inputs, weight_slots

from ....rig import random, relative_error

# GELU's approximation by tanh, as a sigmoid: torch's results, and no other GELU is changed.


WIDE = torch.linspace(-30, 30, 2001)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
def test_it_is_torchs_own(dtype: torch.dtype, tolerance: float) -> None:
    for x in (WIDE, random(1000)):
        right = torch.nn.functional.gelu(x.double(), approximate="tanh")
        assert relative_error(by_sigmoid(x.to(dtype)).double(), right) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_it_is_as_near_to_the_exact_result(dtype: torch.dtype) -> None:
    x = WIDE.to(dtype)
    right = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torchs = torch.nn.functional.gelu(x, approximate="tanh").double()
    assert relative_error(by_sigmoid(x).double(), right) <= 1.01 * relative_error(torchs, right)
    assert by_sigmoid(x).dtype == dtype


@pytest.mark.parametrize(("approximate", "has_sigmoid"), [("tanh", True), ("none", False)])
def test_only_this_approximation_is_changed(approximate: str, has_sigmoid: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    graph = make_fx(run, decompositions(), tracing_mode="symbolic")(random(3, 5))
    names = " ".join(str(node.target) for node in graph.graph.nodes)
    assert ("sigmoid" in names) is has_sigmoid
    assert torch.allclose(graph(random(4, 7)), run(random(4, 7)), atol=1e-6)


# Plain fp8 weights on a card whose compiler has no such types.


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


# comfy-kitchen's rotary operators as plain arithmetic: their results, and no operator of theirs in compiled code.


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


# Upsampling by whole numbers of pixels in a trace: torch's own results, by indices without a division in float64.


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def maps(*shape: int) -> torch.Tensor:
    return random(*shape).contiguous(memory_format=FORMATS[len(shape)])


def upsampled(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, **options)


def traced(x: torch.Tensor, options: dict[str, Any]) -> torch.fx.GraphModule:
    def function(x: torch.Tensor) -> torch.Tensor:
        with ByIndex():
            return upsampled(x, **options)

    graph: torch.fx.GraphModule = make_fx(function, tracing_mode="symbolic")(x)
    return graph


def divides(graph: torch.fx.GraphModule) -> bool:
    """By sizes in floating point, as torch's own does."""
    return "sym_float" in str(graph.graph)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    ("shape", "factor"),
    [((2, 3, 5, 7), 2.0), ((1, 8, 4, 6), (2, 3)), ((2, 4, 3, 5, 7), 2), ((1, 4, 1, 6, 5), (1.0, 2.0, 2.0))],
    ids=str,
)
def test_every_place_has_what_torch_puts_there(shape: tuple[int, ...], factor: Any, mode: str) -> None:
    options = {"scale_factor": factor, "mode": mode}
    graph = traced(maps(*shape), options)
    assert not divides(graph)
    larger = maps(*shape[:2], *(size if size == 1 else size + 3 for size in shape[2:]))
    for x in (maps(*shape), larger):
        result = graph(x)
        assert torch.equal(result, upsampled(x, **options))
        assert result.is_contiguous(memory_format=FORMATS[x.ndim])


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 1.5},
        {"scale_factor": 0.5},
        {"size": (10, 14)},
        {"scale_factor": 2.0, "mode": "bilinear", "align_corners": False},
        {"scale_factor": 2.0, "recompute_scale_factor": True},
    ],
    ids=str,
)
def test_what_is_something_else_stays_torchs_own(options: dict[str, Any]) -> None:
    x = maps(1, 3, 5, 7)
    own = make_fx(lambda x: upsampled(x, **options), tracing_mode="symbolic")(x)
    assert str(traced(x, options).graph) == str(own.graph)


def test_a_map_by_channels_stays_torchs_own() -> None:
    assert divides(traced(random(1, 3, 5, 7), {"scale_factor": 2.0}))


@pytest.mark.parametrize("by", ["position", "name"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_evenly_spaced_numbers_are_traced_for_every_number_of_steps(by: str, dtype: torch.dtype | None) -> None:
    def numbers(x: torch.Tensor) -> torch.Tensor:
        more = (x.shape[0],) if by == "position" else ()
        return torch.linspace(0.25, -16.0, *more, **({"steps": x.shape[0]} if by == "name" else {}), dtype=dtype)

    def function(x: torch.Tensor) -> torch.Tensor:
        with ByIndex():
            return numbers(x)

    graph = make_fx(function, tracing_mode="symbolic")(torch.zeros(6))
    for steps in (1, 2, 3, 6, 7, 100, 1001):
        expected = numbers(torch.zeros(steps))
        torch.testing.assert_close(graph(torch.zeros(steps)), expected, rtol=1e-6, atol=1e-6)
