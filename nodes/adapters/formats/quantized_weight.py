"""Quantize one weight with ComfyUI's layouts into the state dict entries that its modules load."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

import torch

_GROUP = 256  # columns that int8's rotation mixes


@dataclass(frozen=True)
class Format:
    """name: a key of core's `QUANT_ALGOS`. columns: a weight's rows and columns must be multiples of this. bound: a
    weight with a larger relative error keeps its dtype, see docs/models.md.
    """

    name: str
    columns: int
    bound: float


# Normally distributed weights have errors of 0.010 (int8, one scale per row), 0.026 and 0.095. The bounds are 1.5 times
# these; a weight with outliers has a larger error.
FORMATS = {
    "int8": Format("int8_tensorwise", 16, 0.015),
    "fp8": Format("float8_e4m3fn", 16, 0.039),
    "nvfp4": Format("nvfp4", 16, 0.143),
}
_LAYOUTS = {
    "int8": "TensorWiseINT8Layout",
    "fp8": "TensorCoreFP8E4M3Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
}
_HOW: dict[str, dict[str, Any]] = {"int8": {"per_channel": True}, "fp8": {"scale": "recalculate"}, "nvfp4": {}}


def layout_of(name: str) -> Any:
    """ComfyUI's layout class for a format of `FORMATS`; None if this ComfyUI lacks it."""
    return getattr(importlib.import_module("comfy.quant_ops"), _LAYOUTS[name], None)


def settings_of(name: str, weight: torch.Tensor) -> dict[str, Any]:
    """The arguments of the layout's quantizer for a weight (rows, columns)."""
    rotated = name == "int8" and weight.shape[1] % _GROUP == 0
    return {**_HOW[name], **({"convrot": True, "convrot_groupsize": _GROUP} if rotated else {})}


def quantized(name: str, weight: torch.Tensor, device: torch.device) -> tuple[dict[str, torch.Tensor], float]:
    """Quantize a weight to a format of `FORMATS`. Returns its state dict entries, named relative to the module and on
    the weight's own device, and the weight's relative error.

    Raises the layout's errors, such as out of memory on `device`, which computes the result.
    """
    layout, there = layout_of(name), weight.to(device)
    how = settings_of(name, weight)
    about = {"format": FORMATS[name].name, **{key: how[key] for key in how if key.startswith("convrot")}}
    data, params = layout.quantize(there, **how)
    whole = there.double() if device.type == "cpu" else there.float()
    found = layout.dequantize(data, params)[: weight.shape[0], : weight.shape[1]].to(whole.dtype)
    stored = {
        f"weight{ending}": each.to(weight.device) for ending, each in layout.state_dict_tensors(data, params).items()
    }
    stored["comfy_quant"] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    return stored, _error(found - whole, whole)


def _error(difference: torch.Tensor, weight: torch.Tensor) -> float:
    """The relative error of the whole weight or the median over its columns, whichever is larger: one column of
    outliers spoils all others, and the error of the whole hides that.
    """
    # Few operations on the device: the host takes longer to launch one than the device to run it.
    parts, wholes = torch.stack([difference.norm(dim=0), weight.norm(dim=0)]).cpu()
    tiny = torch.finfo(torch.float32).tiny
    whole = parts.norm() / wholes.norm().clamp_min(tiny)
    return float(torch.maximum(whole, (parts / wholes.clamp_min(tiny)).median()))
