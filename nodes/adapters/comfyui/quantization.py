"""Core's quantized weights: the form in which modules request them, and texts about the operators that compute them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.ops
import torch

from ....compile_cache.modules.gguf_weights import LAYOUT as GGUF_LAYOUT

# For each format of core's `QUANT_ALGOS`, the function of `comfy.model_management` that tells if a device has its
# matrix product. A ComfyUI without the function computes the format on every device.
_ASKED = {
    "float8_e4m3fn": "supports_fp8_compute",
    "float8_e5m2": "supports_fp8_compute",
    "nvfp4": "supports_nvfp4_compute",
    "mxfp8": "supports_mxfp8_compute",
    "int8_tensorwise": "supports_int8_compute",
    "convrot_w4a4": "supports_int8_compute",
    "asym_w4a8_int8": "supports_int8_compute",
}
_CUDA_OF_KERNELS = 13  # comfy-kitchen's kernels need a torch for this version of CUDA


@dataclass(frozen=True, slots=True)
class WeightCast:
    """The arguments of core's `cast_bias_weight` that choose the form of a module's weights.

    A weight of another dtype than `dtype` is converted, and dequantized. The cast applies LoRAs in `compute_dtype`, and
    with `want_requant` quantizes the result again.
    """

    dtype: torch.dtype
    bias_dtype: torch.dtype
    compute_dtype: torch.dtype | None = None
    want_requant: bool = False


def weight_cast(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> WeightCast:
    """The arguments that core's forward of a module passes to `cast_bias_weight` for an input in `dtype`.

    Paged weights in another form would give other results: they would be widened, or have a LoRA in full precision.
    """
    weight: Any = module._parameters.get("weight")
    fast = getattr(comfy.ops, "fp8_ops", None)
    if fast is not None and isinstance(module, fast.Linear) and weight.dtype is torch.float8_e4m3fn:
        compute_dtype = comfy.model_management.lora_compute_dtype(device)
        return WeightCast(weight.dtype, dtype, compute_dtype, want_requant=True)
    if not _has_formats(module):
        return WeightCast(dtype, dtype)
    as_stored = getattr(module, "layout_type", None) is not None and not (
        module._full_precision_mm or getattr(module, "comfy_force_cast_weights", False)
    )
    if not as_stored:
        return WeightCast(dtype, dtype, dtype)
    about = _algorithms().get(str(getattr(module, "quant_format", None)), {})
    if about.get("quantize_input", True):
        return WeightCast(dtype, dtype, dtype, want_requant=True)
    return WeightCast(weight.dtype if weight is not None else dtype, dtype, dtype, want_requant=True)


def _has_formats(module: torch.nn.Module) -> bool:
    """The module is a Linear of core's mixed precision. Its expert banks request their weights like other modules."""
    return hasattr(module, "_full_precision_mm") and not hasattr(type(module), "expert_weight")


def formats_in_words(quantized: Iterable[tuple[str, str]], device: torch.device) -> list[str]:
    """One text for each format: "int8_tensorwise products", "emulated nvfp4: ..." with the reason, or "GGUF Q4_K, ...".

    Core's handlers silently fall back to dequantizing: on a card without the product, with a torch for CUDA before 13,
    or at a shape that the product does not support. So the texts follow the operators of a trace.

    quantized: layouts and the operators of their products, see `Trace.quantized`. A layout may occur both with and
    without a product, in different blocks.
    """
    quantized = set(quantized)
    if not quantized:
        return []
    names = {about["comfy_tensor_layout"]: name for name, about in _algorithms().items()}
    found = sorted({(names.get(layout, layout), bool(product)) for layout, product in quantized})
    return [f"{name} products" if product else _without_product(name, device) for name, product in found]


def _lacks_kernels() -> bool:
    """This torch was built for a CUDA older than the kernels need, or for none."""
    return int((torch.version.cuda or "0").partition(".")[0]) < _CUDA_OF_KERNELS


def _without_product(name: str, device: torch.device) -> str:
    if name.startswith(GGUF_LAYOUT):
        return f"{name}, decoded inside the blocks"
    return f"emulated {name}: {_why(name, device)}"


def _why(name: str, device: torch.device) -> str:
    asked = _ASKED.get(name)
    supports: Any = getattr(comfy.model_management, asked, None) if asked else None
    if supports is not None and not supports(device):
        cuda = torch.version.cuda
        if device.type == "cuda" and cuda is not None and _lacks_kernels():
            return f"the products need a torch for CUDA 13, and this one is for {cuda}"
        return "this device has no such products"
    return (
        "some weights are dequantized first: the file asks for it, the product does not take their shape, or it failed"
    )


@functools.cache
def _algorithms() -> dict[str, dict[str, Any]]:
    """Core's formats by name."""
    found: dict[str, dict[str, Any]] = getattr(importlib.import_module("comfy.quant_ops"), "QUANT_ALGOS", {})
    return found
