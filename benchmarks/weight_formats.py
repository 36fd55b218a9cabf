"""Formats of weights for models of `benchmarks.family_models`, and the files in them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import gguf_file


class Format(NamedTuple):
    """A format of weights. core: its name in core's `QUANT_ALGOS`, empty for plain numbers in fp8. arguments: of core's
    quantizer. about: what the file says of each layer. loader: the `weight_dtype` of UNETLoader. tera: what an H200
    reaches in large products of the format, in 10^12 operations a second. gguf: its name in a GGUF file, which is
    loaded by ComfyUI-GGUF; empty for a safetensors file.
    """

    core: str
    arguments: dict[str, Any]
    about: dict[str, Any]
    loader: str
    tera: float
    gguf: str = ""


_ROTATED = {"convrot": True, "convrot_groupsize": 256}
FORMATS = {
    "fp8-scaled": Format("float8_e4m3fn", {"scale": "recalculate"}, {}, "default", 1450),
    "fp8-fast": Format("", {}, {}, "fp8_e4m3fn_fast", 1450),
    "int8": Format("int8_tensorwise", {}, {}, "default", 690),
    "int8-rotated": Format("int8_tensorwise", {"per_channel": True, **_ROTATED}, _ROTATED, "default", 690),
    "w4a4": Format("convrot_w4a4", {}, {}, "default", 790),
    "w4a8": Format("asym_w4a8_int8", {}, {}, "default", 690),
    "mxfp8": Format("mxfp8", {}, {}, "default", 790),
    "nvfp4": Format("nvfp4", {}, {}, "default", 790),
    "q8-0": Format("", {}, {}, "", 790, "Q8_0"),
    "q4-k": Format("", {}, {}, "", 790, "Q4_K"),
}


def file_of(name: str, form: str = "") -> str:
    """form: of `FORMATS`; empty for bf16."""
    ending = "gguf" if form and FORMATS[form].gguf else "safetensors"
    return f"resolute-random-{name}{form and '-'}{form}.{ending}"


def is_of_block(key: str, weight: Any) -> bool:
    """A matrix of a block, which is what files in a format have in it."""
    return bool(weight.ndim == 2 and ("blocks." in key or "layers." in key))


def save(weights: Mapping[str, Any], form: str, name: str, out: Path) -> None:
    """Write the weights in a format; matrices that it cannot hold stay as they are. name: of the family."""
    import safetensors.torch

    if form and FORMATS[form].gguf:
        gguf_file.write(weights, FORMATS[form].gguf, name, is_of_block, out)
        return
    stored = weights if not form else in_format(weights, FORMATS[form])
    safetensors.torch.save_file({key: weight.cpu().contiguous() for key, weight in stored.items()}, str(out))


def in_format(weights: Mapping[str, Any], form: Format) -> dict[str, Any]:
    """The weights with the matrices of the blocks in a format; matrices that it cannot hold stay as they are."""
    import torch

    quant_ops = importlib.import_module("comfy.quant_ops")
    made = dict(weights)
    for key, weight in weights.items():
        if not is_of_block(key, weight):
            continue
        if not form.core:
            made[key] = weight.to(torch.float8_e4m3fn)
            continue
        layout = quant_ops.QUANT_ALGOS[form.core]["comfy_tensor_layout"]
        try:
            parts = quant_ops.QuantizedTensor.from_float(weight, layout, **form.arguments).state_dict(key)
        except ValueError:  # a width that its groups do not divide
            continue
        about = json.dumps({"format": form.core, **form.about}).encode()
        made.update(parts)
        made[f"{key.removesuffix('weight')}comfy_quant"] = torch.tensor(list(about), dtype=torch.uint8)
    return made
