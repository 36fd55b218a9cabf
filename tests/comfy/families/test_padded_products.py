"""Products in nvfp4 and mxfp8, whose inputs comfy-kitchen pads: no size compiles again. Here the CPU stands for a card.

Cards with these products are Blackwell's; what they compute was not run. The way to them is the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import comfy_kitchen
import pytest
import torch
from comfy_kitchen.registry import registry

from . import kit
from .kit import Bench, forget_regions, run_traces
from .models import FIRST, SIZES, Size
from .quantized import in_full_precision, model_of

# Tokens times batch: a multiple of 32, of 16 alone, of neither; the text too.
MORE = [Size(1, 8, 10, 16, 2), Size(1, 5, 7, 32, 3), Size(2, 4, 4, 5, 1)]


def _product_nvfp4(a: Any, b: Any, tensor_scale_a: Any, tensor_scale_b: Any, **more: Any) -> torch.Tensor:
    x = comfy_kitchen.dequantize_nvfp4(a, tensor_scale_a, more["block_scale_a"], torch.float32)
    weight = comfy_kitchen.dequantize_nvfp4(b, tensor_scale_b, more["block_scale_b"], torch.float32)
    return torch.nn.functional.linear(x, weight, more["bias"]).to(more["out_dtype"])


def _product_mxfp8(a: Any, b: Any, block_scale_a: Any, block_scale_b: Any, **more: Any) -> torch.Tensor:
    x = comfy_kitchen.dequantize_mxfp8(a, block_scale_a, torch.float32)
    weight = comfy_kitchen.dequantize_mxfp8(b, block_scale_b, torch.float32)
    return torch.nn.functional.linear(x, weight, more["bias"]).to(more["out_dtype"])


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ComfyUI finds such products on this device, and comfy-kitchen has them for it."""
    management = importlib.import_module("comfy.model_management")
    own: dict[str, Callable[..., Any]] = {"scaled_mm_nvfp4": _product_nvfp4, "scaled_mm_mxfp8": _product_mxfp8}
    original = registry.get_implementation
    for name in ("nvfp4", "mxfp8"):
        monkeypatch.setattr(management, f"supports_{name}_compute", lambda device=None: True)
    monkeypatch.setattr(
        registry, "get_implementation", lambda name, *args, **kwargs: own.get(name) or original(name, *args, **kwargs)
    )
    yield


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("lowered", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_no_size_compiles_again(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, lowered: bool
) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    if not lowered:
        run_traces(core, monkeypatch)
    monkeypatch.setattr(kit, "TOLERANCE", 0.2 if lowered else 1e-6)
    forget_regions(core)
    bench = Bench(core, model_of("LTX", name))
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    bench.check_all((*SIZES, *MORE))
    assert bench.formats() == [[f"{name} products"]]
    errors = bench.errors(in_full_precision(bench), (FIRST, *MORE))
    assert all(ours <= 1.5 * cores for ours, cores in zip(*errors, strict=True)), errors
    forget_regions(core)


@pytest.mark.usefixtures("products")
def test_outside_of_a_trace_comfy_kitchen_asks_as_before() -> None:
    shape = importlib.import_module("comfy.quant_ops").TensorCoreNVFP4Layout.get_padded_shape((32, 64))
    assert shape == (32, 64)
    assert type(shape) is tuple
