"""comfy-kitchen's quantizers as arithmetic: as near to float32 as its own kernels, and fused into what comes before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import comfy_kitchen  # noqa: F401 (it registers the operators)
import pytest
import torch
from torch import nn

from compile_cache.backends.inductor.lower import decompositions, quantizers
from compile_cache.backends.inductor.lower.artifacts import pack, unpack
from compile_cache.backends.inductor.lower.compiled_region import CompiledRegion
from compile_cache.backends.inductor.lower.lowering import compile_trace
from compile_cache.backends.inductor.lower.tracing import trace

WIDTH = 64
E4M3, E5M2 = 5, 6  # comfy-kitchen's numbers of these dtypes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPERATORS = torch.ops.comfy_kitchen


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def values(dtype: torch.dtype, rows: int = 50) -> torch.Tensor:
    """Of many magnitudes, some beyond the largest number of 8 bits."""
    torch.manual_seed(rows)
    return (torch.randn(rows, WIDTH) * 2.0 ** torch.randint(-6, 9, (rows, 1))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("code", "scale"), [(E4M3, 1.0), (E4M3, 0.37), (E5M2, 1.0), (E5M2, 11.3)])
def test_fp8_is_as_near_to_float32_as_comfy_kitchens_own(dtype: torch.dtype, code: int, scale: float) -> None:
    x, factor = values(dtype), torch.tensor(scale)
    largest = torch.finfo(quantizers._FLOATS_OF_8_BITS[code]).max
    exact = (x.double() / scale).clamp(-largest, largest)
    own, cores = quantizers.quantize_fp8(x, factor, code), OPERATORS.quantize_fp8(x, factor, code)
    assert own.dtype == cores.dtype
    assert distance(own, exact) <= distance(cores, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_int8_are_as_near_to_float32_as_comfy_kitchens_own(dtype: torch.dtype) -> None:
    x = values(dtype)
    x[3] = 0.0
    (own, scale), (cores, its_scale) = quantizers.quantize_int8_rowwise(x), OPERATORS.quantize_int8_rowwise(x)
    assert (own.dtype, scale.dtype, scale.shape) == (cores.dtype, its_scale.dtype, its_scale.shape)
    assert distance(own * scale.double(), x.double()) <= distance(cores * its_scale.double(), x.double())


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm())


class Fp8(nn.Module):
    """A norm and a gate before a quantizer, as in a block."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        normal = nn.functional.layer_norm(x, (WIDTH,)) * torch.sigmoid(x)
        result: torch.Tensor = OPERATORS.quantize_fp8(normal, scale, E4M3)
        return result


class Int8(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = OPERATORS.quantize_int8_rowwise(nn.functional.silu(x) * scale)
        return result


def compiled(module: nn.Module) -> CompiledRegion:
    def run(each: nn.Module, *tensors: torch.Tensor) -> Any:
        return type(each).forward(each, *tensors)

    inputs = [torch.randn(3, WIDTH, dtype=torch.bfloat16), torch.ones(())]
    return compile_trace(trace(run, module, inputs, [("n", None), ()], {"n": 3}))


@pytest.mark.parametrize("module", [Fp8(), Int8()], ids=["fp8", "int8"])
def test_a_quantizer_is_fused_and_serves_every_size_and_value(module: nn.Module) -> None:
    made = compiled(module)
    assert made.graph is not None
    assert "ops.comfy_kitchen" not in made.graph.source_code
    for rows, scale in ((3, 1.0), (50, 0.5), (7, 3.0)):
        inputs = [values(torch.bfloat16, rows), torch.tensor(scale)]
        exact, cores = (_numbers(module(*given)) for given in ([inputs[0].float(), inputs[1]], inputs))
        assert distance(_numbers(made([], inputs)), exact) <= distance(cores, exact)


def _numbers(result: Any) -> torch.Tensor:
    numbers, scale = result if isinstance(result, tuple) else (result, torch.ones(()))
    return numbers.double() * scale.double()


class Scales(nn.Module):
    """Asks for a scale of one for each of its quantizers, as core does, and writes to another one."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scales = [torch.ones((), dtype=torch.float32) for _ in range(3)]
        own = torch.ones((), dtype=torch.float32)
        own.add_(1.0)
        return [*[x / scale for scale in scales], x / own, x / torch.ones((), dtype=torch.float64)]


def test_quantizers_share_their_scale_of_one() -> None:
    x = torch.randn(3, WIDTH)
    made = trace(lambda each, x: each.forward(x), Scales(), [x], [("n", None)], {"n": 3})
    ones = [node for node in made.graph.graph.nodes if node.target is torch.ops.aten.ones.default]
    assert sorted(len(node.users) for node in ones) == [1, 1, 3]
    for found, expected in zip(made.graph(x), Scales()(x), strict=True):
        assert torch.equal(found, expected)


def test_without_comfy_kitchen_there_is_nothing_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(decompositions.of_kitchen()) == 6
    monkeypatch.setattr(decompositions, "NAMESPACE", "a_package_that_is_not_there")
    assert decompositions.of_kitchen() == {}


class Clamping(nn.Module):
    """Clamps its second input in place, as core's product for plain fp8 weights does."""

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        flat = text.reshape(-1, WIDTH)
        torch.clamp(flat, min=-448, max=448, out=flat)
        return x + text.mean(1, keepdim=True)


class Adding(nn.Module):
    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return x + text.add_(1.0).mean(1, keepdim=True)


def region(module: nn.Module, keep: bool = False) -> CompiledRegion:
    run: Callable[..., Any] = lambda each, *tensors: type(each).forward(each, *tensors)  # noqa: E731
    inputs = [torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)]
    return compile_trace(
        trace(run, module, inputs, [("b", "n", None), ("b", "t", None)], {"b": 17, "n": 5, "t": 3}), keep
    )


def test_an_input_that_is_clamped_in_place_holds_what_eager_leaves_there() -> None:
    made = region(Clamping())
    assert made.written == [1]
    for sizes in ((2, 5, 3), (1, 8, 4)):
        x, text = torch.randn(*sizes[:2], WIDTH), 1000 * torch.randn(sizes[0], sizes[2], WIDTH)
        eager = text.clone()
        expected = Clamping()(x, eager)
        for _ in range(2):  # comparing runs the code once more
            torch.testing.assert_close(made([], [x, text]), expected)
            assert torch.equal(text, eager)


def test_what_is_written_to_is_known_after_a_restart() -> None:
    made = region(Clamping(), keep=True)
    assert unpack(pack("key", "Clamping", made)).written == made.written == [1]


def test_any_other_write_into_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match="writes into its input"):
        region(Adding())
