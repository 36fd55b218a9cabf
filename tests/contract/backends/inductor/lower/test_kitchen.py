"""comfy-kitchen's operators in traces: none is unknown, none is traced through, and the caches stay real."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import comfy_kitchen
import pytest
import torch
from comfy_kitchen.backends.eager import convrot_w4a4 as eager
from comfy_kitchen.registry import registry
from comfy_kitchen.tensor import QuantizedTensor, convrot_w4a4, int8_utils, w4a8_int8
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from compile_cache.attribute_policy import ModuleAttributePolicy
from compile_cache.backends.inductor.compiler.job import job_of, settings_for
from compile_cache.backends.inductor.lower import kitchen
from compile_cache.backends.inductor.lower.artifacts import unpack
from compile_cache.backends.inductor.lower.tracing import Trace, trace
from compile_cache.modules.region_weights import cast_pattern, weight_inputs, weight_slots, weights_from_inputs
from compile_cache.modules.structure import structure_digest
from compile_cache.modules.weight_parts import form_of
from compile_cache.store.artifact_store import Artifact
from compile_cache.torch_compat.operators import NAMESPACE

from .....programs import run_python

WIDTH = 64
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TensorWiseINT8Layout": ("int8_linear", {}),
    "TensorCoreConvRotW4A4Layout": ("convrot_w4a4_linear", {"convrot_groupsize": 16}),
    "AsymW4A8Int8Layout": ("w4a8_int8_linear", {"convrot_groupsize": 16}),
    "TensorCoreFP8Layout": ("", {}),
    "TensorCoreNVFP4Layout": ("", {}),
    "TensorCoreMXFP8Layout": ("", {}),
}
# The functions and operators of comfy-kitchen 0.2.31. Before you add one: if a block of a model calls it, it must be an
# operator of torch with a fake, or get one in kitchen.py.
KNOWN = {
    # of blocks: operators with fakes
    "adaln", "apply_rope", "apply_rope1", "apply_rope1_", "apply_rope_", "apply_rope_split_half",
    "apply_rope_split_half1", "apply_rope_split_half1_", "apply_rope_split_half_", "dequantize_fp8",
    "dequantize_int8_convrot_weight", "dequantize_int8_convrot_weight_dtype", "dequantize_int8_embedding",
    "dequantize_int8_simple", "dequantize_int8_simple_dtype", "dequantize_mxfp8", "dequantize_nvfp4",
    "gemv_awq_w4a16", "int8_attention", "int8_attention_masked", "int8_linear", "na3d", "quantize_fp8",
    "quantize_int8_rowwise", "quantize_int8_tensorwise", "quantize_mxfp8", "quantize_nvfp4", "quantize_svdquant_w4a4",
    "rms_adaln", "rms_rope", "rms_rope1", "rms_rope1_", "rms_rope_", "rms_rope_split_half", "rms_rope_split_half1",
    "rms_rope_split_half1_", "rms_rope_split_half_", "scaled_mm_mxfp8", "scaled_mm_nvfp4", "scaled_mm_svdquant_w4a4",
    # of blocks: operators of ours
    "convrot_w4a4_linear", "dequantize_convrot_w4a4_weight", "dequantize_w4a8_int8_weight", "w4a8_int8_linear",
    # the kernels behind quantize_fp8 and dequantize_fp8, and inside of others
    "dequantize_per_tensor_fp8", "prepare_int4_weight_for_int8_linear", "quantize_and_rotate_rowwise",
    "quantize_per_tensor_fp8",
    # of weights, when a model or a LoRA is loaded
    "quantize_convrot_w4a4_weight", "quantize_int8_convrot_weight", "quantize_w4a8_int8_weight",
    "rotate_int8_convrot_weight", "stochastic_rounding_fp8",
}  # fmt: skip
# Of 0.2.40. ComfyUI calls those of the first line from blocks (operators of ours) and from decoders (operators with
# fakes); the others only other programs.
KNOWN_LATER = {
    "fp16_linear", "w4a8_packed_linear", "fp16_conv3d", "fp16_conv3d_out", "group_norm_silu_pad3d",
    "group_norm_silu_pad3d_out", "group_norm_stats3d",
    "int8_linear_modulated", "int8_linear_rms_modulated", "rms_gated_residual", "sol_attn",
}  # fmt: skip


class Linear(nn.Module):
    """A Linear whose weight may be quantized; it takes tokens."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(WIDTH, WIDTH, generator=generator)
        made = QuantizedTensor.from_float(weight, layout, **LAYOUTS[layout][1])
        self.weight = nn.Parameter(made, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = type(module).forward(module, x)
    return result


def traced(module: nn.Module) -> Trace:
    x = torch.randn(2, 5, WIDTH)
    return trace(run, module, [x], [("b", "n", None)], {"b": 17, "n": 5})


def result_of(made: Trace, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights = weight_inputs(weight_slots(module))
    result: torch.Tensor = made.graph(*[weights[index] for index in made.used_weights], x)[0]
    return result


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_trace_serves_other_weights_and_sizes_and_names_the_product(layout: str) -> None:
    made = traced(Linear(layout))
    assert made.quantized == ((layout, LAYOUTS[layout][0]),)
    for seed, shape in [(0, (2, 5)), (1, (3, 7)), (2, (1, 4))]:
        module, x = Linear(layout, seed), torch.randn(*shape, WIDTH)
        assert torch.equal(result_of(made, module, x), module(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_leaves_the_caches_real(layout: str) -> None:
    module, x = Linear(layout), torch.randn(2, 5, WIDTH)
    before = module(x)
    for cache in _caches():
        cache.clear()
    traced(module)
    assert _fake_in_caches() == []
    assert torch.equal(module(x), before)


def _caches() -> list[dict[Any, Any]]:
    return [eager._HADAMARD_CACHE, int8_utils._HADAMARD_CACHE]


def _fake_in_caches() -> list[str]:
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] == kitchen.NAMESPACE]
    caches = [
        (f"{each.__name__}.{name}", vars(each)[name])
        for each in modules
        for name in vars(each)
        if name.endswith("_CACHE")
    ]
    return [name for name, cache in caches if any(isinstance(each, FakeTensor) for each in cache.values())]


def test_every_function_of_comfy_kitchen_is_known() -> None:
    functions = set().union(*(about["capabilities"] for about in comfy_kitchen.list_backends().values()))
    prefix = f"{kitchen.NAMESPACE}::"
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    operators = {name.removeprefix(prefix).partition(".")[0] for name in registered}
    assert (functions | operators) - KNOWN_LATER == KNOWN


def test_our_operators_compute_what_comfy_kitchens_functions_do() -> None:
    x = torch.randn(3, WIDTH)
    for layout, function in (
        ("TensorCoreConvRotW4A4Layout", convrot_w4a4.dequantize_convrot_w4a4_weight),
        ("AsymW4A8Int8Layout", w4a8_int8.dequantize_w4a8_int8_weight),
    ):
        weight = Linear(layout).weight
        plain = weight.dequantize()
        with kitchen.opaque():
            assert torch.equal(weight.dequantize(), plain)
        assert function.__name__ in kitchen.operators()
    quantized = Linear("TensorWiseINT8Layout").weight
    given = (x, quantized._qdata, quantized._params.scale)
    expected = comfy_kitchen.int8_linear(*given, out_dtype=torch.float32)
    with kitchen.opaque():
        assert torch.equal(comfy_kitchen.int8_linear(*given, out_dtype=torch.float32), expected)
    assert "get_implementation" not in vars(registry)


WORKER = """
import pickle, sys
from compile_cache.backends.inductor.compiler import job
made, _ = job.work(pickle.loads(bytes.fromhex(sys.stdin.read())))
print(pickle.dumps(made).hex())
"""


@pytest.mark.parametrize("layout", ["TensorWiseINT8Layout", pytest.param("AsymW4A8Int8Layout", marks=pytest.mark.long)])
def test_a_worker_compiles_a_graph_that_calls_comfy_kitchen(layout: str) -> None:
    """A worker has no ComfyUI: it imports comfy-kitchen for such a graph, or has our operators."""
    module, x = Linear(layout), torch.randn(3, 7, WIDTH)
    work = vars(job_of("key", "Linear", traced(module), settings_for(torch.device("cpu"))))
    printed = run_python(WORKER, given=pickle.dumps(work).hex())
    made = pickle.loads(bytes.fromhex(printed.splitlines()[-1]))
    assert isinstance(made, dict), made
    compiled = unpack(Artifact(**made))
    assert compiled.quantized == ((layout, LAYOUTS[layout][0]),)
    assert torch.equal(compiled(weight_inputs(weight_slots(module)), [x]), module(x))


def test_a_worker_imports_comfy_kitchen_and_no_package_that_has_the_name_of_our_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test runner imports the pack by the name of its folder, `resolute` in a clone; a worker cannot."""
    monkeypatch.setitem(sys.modules, NAMESPACE, ModuleType(NAMESPACE))
    packages = {layout: job_of("key", "Linear", traced(Linear(layout)), {}).packages for layout in LAYOUTS}
    assert packages["TensorWiseINT8Layout"] == (kitchen.NAMESPACE,)
    assert packages["AsymW4A8Int8Layout"] == ()


class TestForms:
    def test_a_weight_that_computes_otherwise_has_another_form_and_another_structure(self) -> None:
        one, other = Linear("TensorWiseINT8Layout"), Linear("TensorWiseINT8Layout", 1)
        assert form_of(one.weight).text == form_of(other.weight).text  # type: ignore[union-attr]
        assert structure_digest(one) == structure_digest(other)
        for change in ({"convrot": True}, {"orig_dtype": torch.bfloat16}, {"scale": torch.ones(WIDTH, 1)}):
            weight = other.weight
            params = dataclasses.replace(weight._params, **change)
            other.weight = nn.Parameter(QuantizedTensor(weight._qdata, weight._layout_cls, params), False)
            assert structure_digest(one) != structure_digest(other), change
            assert _pattern(one) != _pattern(other), change
            other.weight = weight

    def test_a_weight_is_given_to_a_trace_in_parts(self) -> None:
        module = Linear("AsymW4A8Int8Layout")
        inputs = [part.clone() for part in weight_inputs(weight_slots(module))]
        assert len(inputs) == 5  # numbers, scales of groups and channels, codebook; and the bias
        x = torch.randn(2, WIDTH)
        expected, before = module(x), module.weight
        with weights_from_inputs(module, (), inputs):
            assert module.weight is not before
            assert torch.equal(module(x), expected)
            inputs[0].zero_()
            assert not torch.equal(module(x), expected)
        assert module.weight is before


def _pattern(module: nn.Module) -> Any:
    policy = ModuleAttributePolicy(knows_layout=lambda kind: True)
    return cast_pattern([], weight_slots(module), torch.float32, torch.device("cpu"), policy)
