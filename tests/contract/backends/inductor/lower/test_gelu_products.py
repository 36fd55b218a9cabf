"""A linear layer and GELU by tanh as one operator: where it stands in for both, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.backends.inductor.lower import casts, gelu
from compile_cache.backends.inductor.lower.artifacts import pack, unpack
from compile_cache.backends.inductor.lower.lowering import compile_trace
from compile_cache.backends.inductor.lower.tracing import Trace, trace
from compile_cache.modules.region_weights import weight_inputs, weight_slots

from .....programs import run_python
from ....rig import random
from ..described import needs_descriptions

WIDTH, HIDDEN = 24, 40
HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Layer(nn.Module):
    """A linear layer with GELU and another one, as in a transformer. stored: the dtype of the first one's weights."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        stored: torch.dtype | None = None,
        bias: bool = True,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, HIDDEN, bias=bias), nn.Linear(HIDDEN, width)
        self.to(dtype).requires_grad_(False)
        self.up.to(stored or dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.up.bias is None else self.up.bias.to(x.dtype)
        return nn.functional.linear(x, self.up.weight.to(x.dtype), bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(nn.functional.gelu(self.product(x), approximate="tanh"))


class Exact(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down(nn.functional.gelu(self.product(x)))


class TakenTwice(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        product = self.product(x)
        return nn.functional.gelu(product, approximate="tanh") + product


class FlatTakenTwice(Layer):
    """Both users take views of their own."""

    def forward(self, x: torch.Tensor) -> Any:
        product = torch.addmm(self.up.bias, x.flatten(0, 1), self.up.weight.t())
        one, other = (product.view(-1, 2, HIDDEN // 2) for _ in range(2))
        return nn.functional.gelu(one, approximate="tanh") + other


class InParts(Layer):
    """GELU takes a part of the product, as in Flux's single block."""

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.product(x).chunk(2, -1)
        return first + nn.functional.gelu(second, approximate="tanh")


class Dequantized(Layer):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.up.weight * 0.5, self.up.bias)


class Untransposed(Layer):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.up.bias, x.flatten(0, 1), self.down.weight)


class Scaled(Layer):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.up.bias, x.flatten(0, 1), self.up.weight.t(), alpha=2.0)


class WithMatrix(Layer):
    """It adds a row for each token."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        return torch.addmm(flat.repeat(1, 2)[:, :HIDDEN], flat, self.up.weight.t())


class Written(Layer):
    """The result is written to, and x too after the product."""

    def forward(self, x: torch.Tensor) -> Any:
        own = x + 1.0
        hidden = nn.functional.gelu(self.product(own), approximate="tanh")
        own.mul_(2.0)
        return self.down(hidden.add_(1.0)) + own


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def as_on_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gelu, "is_nvidia", lambda device: True)


def numbers(module: Layer, *shape: int) -> torch.Tensor:
    return random(*shape, module.up.in_features).to(module.down.weight.dtype)


def run(module: nn.Module, x: torch.Tensor) -> Any:
    return type(module).forward(module, x)


def traced(module: Layer, *shape: int) -> Trace:
    names = ("b", "n")[-len(shape) :]
    return trace(run, module, [numbers(module, *shape)], [(*names, None)], dict(zip(names, shape, strict=True)))


def operators(graph: torch.fx.Graph) -> list[str]:
    names = [str(node.target).removesuffix(".default") for node in graph.nodes]
    return [name for name in names if name in ("resolute.addmm_gelu", "aten.addmm", "aten.gelu")]


@pytest.mark.usefixtures("as_on_nvidia")
@pytest.mark.parametrize("shape", [(17, 5), (17,)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [*((dtype, dtype) for dtype in HALVES), *((torch.bfloat16, stored) for stored in (*FP8, torch.float32))],
    ids=str,
)
@pytest.mark.parametrize("kind", [Layer, Written])
def test_a_linear_layer_and_its_gelu_are_one_operator(
    kind: type[Layer], dtype: torch.dtype, stored: torch.dtype, shape: tuple[int, ...]
) -> None:
    module = kind(dtype, stored)
    made = traced(module, *shape)
    assert operators(made.graph.graph) == ["resolute.addmm_gelu", "aten.addmm"]
    weights = weight_inputs(weight_slots(module))
    for sizes in ((2, 7), (1, 1)):
        x = numbers(module, *sizes[-len(shape) :])
        (found,) = made.graph(*[weights[index] for index in made.used_weights], x)
        torch.testing.assert_close(found, module(x))


@pytest.mark.usefixtures("as_on_nvidia")
def test_a_weight_that_an_operator_casts_is_joined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_lacks_fp8", lambda device: True)
    graph = traced(Layer(stored=FP8[0]), 17, 5).graph.graph
    assert torch.ops.resolute.cast_from_fp8.default in {node.target for node in graph.nodes}
    assert operators(graph) == ["resolute.addmm_gelu", "aten.addmm"]


@pytest.mark.usefixtures("as_on_nvidia")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_compiled_and_stored_it_serves_every_size(dtype: torch.dtype) -> None:
    module = Layer(dtype)
    region = unpack(pack("key", "Layer", compile_trace(traced(module, 17, 5), keep=True)))
    assert region.graph is not None
    assert region.graph.source_code.count("torch.ops.resolute.addmm_gelu.default(") == 1
    weights = weight_inputs(weight_slots(module))
    for sizes in ((1, 5), (2, 5), (2, 1), (1, 1), (3, 64)):
        x = numbers(module, *sizes)
        torch.testing.assert_close(region(weights, [x]), module(x))


@pytest.mark.usefixtures("as_on_nvidia")
@pytest.mark.parametrize(
    "module",
    [
        Exact(), TakenTwice(), FlatTakenTwice(), InParts(), Dequantized(), Untransposed(), Scaled(), WithMatrix(),
        Layer(torch.float32), Layer(torch.float32, torch.bfloat16), Layer(bias=False), Layer(width=1),
    ],
    ids=lambda module: f"{type(module).__name__} {module.up.extra_repr()} {module.down.weight.dtype}",
)  # fmt: skip
def test_anything_else_stays_two(module: Layer) -> None:
    found = operators(traced(module, 17, 5).graph.graph)
    assert "aten.gelu" in found
    assert "resolute.addmm_gelu" not in found


def test_other_devices_and_a_torch_without_it_keep_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(device: str) -> list[str]:
        graph = traced(Layer(), 17, 5).graph.graph
        gelu.join_products(graph, torch.device(device))
        return operators(graph)

    both, joined = ["aten.addmm", "aten.gelu", "aten.addmm"], ["resolute.addmm_gelu", "aten.addmm"]
    assert (on("cpu"), on("cuda")) == (both, joined)
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.0")
        assert on("cuda") == both
    monkeypatch.setattr(gelu, "addmm_activation", None)
    assert on("cuda") == both


def test_on_a_gpu_torchs_own_product_with_gelu_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tensors without contents: torch's own function says there what it would return."""
    calls = []

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(named)
        return torch._addmm_activation(*given, **named)

    monkeypatch.setattr(gelu, "addmm_activation", noted)
    with torch._subclasses.FakeTensorMode():
        for rows in (5, 1, 0):
            sizes = ((HIDDEN,), (rows, WIDTH), (HIDDEN, WIDTH))
            bias, x, weight = (torch.empty(each, dtype=torch.bfloat16, device="cuda") for each in sizes)
            results = gelu._run(bias, x, weight.t()), gelu.operator()(bias, x, weight.t())
            assert {(each.shape, each.stride(), each.dtype, each.device) for each in results} == {
                ((rows, HIDDEN), (HIDDEN, 1), torch.bfloat16, x.device)
            }
    assert calls == 3 * [{"use_gelu": True}]


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_without_one_it_is_the_same_approximation(rows: int) -> None:
    bias, x, weight = random(HIDDEN), random(rows, WIDTH), random(HIDDEN, WIDTH)
    expected = nn.functional.gelu(nn.functional.linear(x, weight, bias), approximate="tanh")
    assert torch.equal(gelu.operator()(bias, x, weight.t()), expected)


# Compiles a block for a card that is not there, and prints the calls of its code.
COMPILE = """
import sys
import torch
from benchmarks.cards import description
from compile_cache.backends.inductor.compiler import described_gpu
described_gpu.install_fake_gpu(description("sm_90"))
from compile_cache.backends.inductor.lower.lowering import compile_trace
from compile_cache.backends.inductor.lower.tracing import trace
from tests.contract.backends.inductor.lower.test_gelu_products import Layer, run

class Block(Layer):
    def forward(self, x):
        return x + super().forward(torch.nn.functional.layer_norm(x, x.shape[-1:]))

with torch._subclasses.FakeTensorMode():
    x = torch.empty(2, 64, 24, dtype=getattr(torch, sys.argv[1]), device="cuda")
module = Block(x.dtype).to("meta")
made = compile_trace(trace(lambda each, x: each.forward(x), module, [x], [("b", "n", None)], {"b": 2, "n": 64}))
code = made.graph.source_code
lines = [line.strip() for line in code[code.index("def call"):].splitlines()]
print(*[line for line in lines if ".run(" in line or "torch.ops." in line or "extern_kernels" in line], sep=chr(10))
"""


@needs_descriptions
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_code_for_a_gpu_has_no_kernel_and_no_copy_beside_it(dtype: str) -> None:
    norm, joined, product, residual = [
        line for line in run_python(COMPILE, dtype, CUDA_VISIBLE_DEVICES="").splitlines() if "assert_" not in line
    ]
    assert norm.startswith("triton_per_fused")
    assert "torch.ops.resolute.addmm_gelu.default(arg" in joined
    assert f"reinterpret_tensor(arg0_1, ({WIDTH}, {HIDDEN}), (1, {WIDTH}), 0)" in joined  # the weight, where it lies
    assert product.startswith("extern_kernels.")
    assert residual.startswith("triton_poi_fused")
