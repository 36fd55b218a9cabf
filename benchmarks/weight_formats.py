"""Weight formats for models of `benchmarks.family_models`, and their files."""

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
    """The file name of a model. form: a key of `FORMATS`; empty for bf16."""
    return f"resolute-random-{name}{form and '-'}{form}.safetensors"


def is_of_block(key: str, weight: Any) -> bool:
    """True for a matrix of a block: quantized files have only these in their format."""
    return bool(weight.ndim == 2 and ("blocks." in key or "layers." in key))


def save(weights: Mapping[str, Any], form: str, out: Path) -> None:
    """Write the weights in a format, or unchanged if empty. Matrices that do not fit the format keep their dtype."""
    import safetensors.torch

    stored = weights if not form else in_format(weights, FORMATS[form])
    safetensors.torch.save_file({key: weight.cpu().contiguous() for key, weight in stored.items()}, str(out))


def in_format(weights: Mapping[str, Any], form: Format) -> dict[str, Any]:
    """The weights, with the blocks' matrices in a format. Matrices that do not fit the format keep their dtype."""
    import torch

    quant_ops = importlib.import_module("comfy.quant_ops")
    made = dict(weights)
    for key, weight in weights.items():
        if not is_of_block(key, weight):
            continue
        layout = quant_ops.QUANT_ALGOS[form.core]["comfy_tensor_layout"]
        try:
            parts = quant_ops.QuantizedTensor.from_float(weight, layout, **form.arguments).state_dict(key)
        except ValueError:  # a width that is no multiple of the format's groups
            continue
        about = json.dumps({"format": form.core}).encode()
        made.update(parts)
        made[f"{key.removesuffix('weight')}comfy_quant"] = torch.tensor(list(about), dtype=torch.uint8)
    return made
