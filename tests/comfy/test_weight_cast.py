"""Paged weights are loaded in the form in which core's own forward asks for them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

WIDTH = 64


def _mixed(name: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    """A Linear of core's mixed precision in a format, as its loader makes it; an empty name for a plain weight."""

    def make() -> torch.nn.Module:
        ops, quant_ops = importlib.import_module("comfy.ops"), importlib.import_module("comfy.quant_ops")
        linear = ops.mixed_precision_ops(compute_dtype=torch.bfloat16, **settings).Linear(WIDTH, WIDTH)
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
        if name:
            linear.quant_format, linear.layout_type = name, quant_ops.QUANT_ALGOS[name]["comfy_tensor_layout"]
            if name in settings.get("disabled", ()):
                linear._full_precision_mm = True
            about = {"convrot_groupsize": 64} if name in ("convrot_w4a4", "asym_w4a8_int8") else {}
            weight = quant_ops.QuantizedTensor.from_float(weight, linear.layout_type, **about)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        return linear.requires_grad_(False)

    return make


def _of(operations: str, dtype: torch.dtype) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        kind = getattr(importlib.import_module("comfy.ops"), operations).Linear
        linear = kind(WIDTH, WIDTH, dtype=torch.bfloat16)
        linear.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype), requires_grad=False)
        return linear.requires_grad_(False)

    return make


FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "mxfp8", "nvfp4")
MODULES = {
    "fp8, fast": _of("fp8_ops", torch.float8_e4m3fn),
    "e5m2 in the fast operations": _of("fp8_ops", torch.float8_e5m2),
    "fp8": _of("manual_cast", torch.float8_e4m3fn),
    "bf16": _of("manual_cast", torch.bfloat16),
    "mixed, plain": _mixed(""),
    **{name: _mixed(name) for name in FORMATS},
    **{f"emulated {name}": _mixed(name, disabled={name}) for name in FORMATS},
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_gets_its_weights_as_its_forward_asks_for_them(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ops = importlib.import_module("comfy.ops")
    module, x = MODULES[name](), torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
    asked: list[tuple[Any, ...]] = []
    original = ops.cast_bias_weight

    def cast_bias_weight(s: Any, input: Any = None, dtype: Any = None, **more: Any) -> Any:
        of_input = None if input is None else getattr(input, "_params", None)
        own = dtype or (input.dtype if of_input is None else of_input.orig_dtype)
        asked.append((own, more.get("bias_dtype") or own, more.get("compute_dtype"), more.get("want_requant", False)))
        return original(s, input, dtype=dtype, **more)

    monkeypatch.setattr(ops, "cast_bias_weight", cast_bias_weight)
    with torch.inference_mode():
        module(x)
    found = core.ours("comfyui.quantization").weight_cast(module, x.dtype, x.device)
    assert (found.dtype, found.bias_dtype, found.compute_dtype, found.want_requant) == asked[0]


def test_a_load_without_pages_makes_no_other_structure_of_a_model(core: SimpleNamespace) -> None:
    """With LoRA hooks core takes a copy of the model that has no pages, and its regions are those of the model."""
    patcher = core.tiny_model().build(0, "sd")[0]
    policy = core.ours("comfyui.module_attributes").ATTRIBUTES
    digest = core.inside("modules.structure").structure_digest
    new = digest(patcher.model.diffusion_model, policy=policy)
    for dtype in (None, torch.float16):
        patcher.set_model_compute_dtype(dtype)
        patcher.patch_model(patcher.load_device)
        assert any(hasattr(module, "comfy_force_cast_weights") for module in patcher.model.modules())
        assert digest(patcher.model.diffusion_model, policy=policy) == new
        patcher.unpatch_model(patcher.offload_device)
    ops = inspect.getsource(core.comfy.ops)
    readers = inspect.getsource(core.comfy.ops.mixed_precision_ops).count("comfy_force_cast_weights")
    assert readers == ops.count("comfy_force_cast_weights") > 0, "another class reads it: see ATTRIBUTES.switch"
