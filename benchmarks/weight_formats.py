"""Formats of weights for models of `benchmarks.family_models`, and the files in them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Format(NamedTuple):
    """core: the format's name in core's `QUANT_ALGOS`. arguments: of core's quantizer."""

    core: str
    arguments: dict[str, Any]


FORMATS = {
    "fp8-scaled": Format("float8_e4m3fn", {"scale": "recalculate"}),
    "int8": Format("int8_tensorwise", {}),
}


def file_of(name: str, form: str = "") -> str:
    """form: of `FORMATS`; empty for bf16."""
    return f"resolute-random-{name}{form and '-'}{form}.safetensors"


def is_of_block(key: str, weight: Any) -> bool:
    """A matrix of a block, which is what files in a format have in it."""
    return bool(weight.ndim == 2 and ("blocks." in key or "layers." in key))


def save(weights: Mapping[str, Any], form: str, out: Path) -> None:
    """Write the weights in a format; matrices that it cannot hold stay as they are."""
    import safetensors.torch

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
        layout = quant_ops.QUANT_ALGOS[form.core]["comfy_tensor_layout"]
        try:
            parts = quant_ops.QuantizedTensor.from_float(weight, layout, **form.arguments).state_dict(key)
        except ValueError:  # a width that its groups do not divide
            continue
        about = json.dumps({"format": form.core}).encode()
        made.update(parts)
        made[f"{key.removesuffix('weight')}comfy_quant"] = torch.tensor(list(about), dtype=torch.uint8)
    return made
