"""Small models whose blocks have quantized weights, in a file as people have it: made by ComfyUI's own loader."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import torch

from .models import MODELS, Model

# Of each format: what is in its metadata, and the arguments of core's quantizer.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float8_e4m3fn": ({}, {"scale": "recalculate"}),
    "float8_e5m2": ({}, {"scale": "recalculate"}),
    "int8_tensorwise": ({}, {}),
    "int8_tensorwise, rotated": (
        {"convrot": True, "convrot_groupsize": 16},
        {"per_channel": True, "convrot": True, "convrot_groupsize": 16},
    ),
    "convrot_w4a4": ({"convrot_groupsize": 16}, {"convrot_groupsize": 16}),
    "asym_w4a8_int8": ({"group_size": 16, "convrot_groupsize": 16}, {"group_size": 16, "convrot_groupsize": 16}),
    "mxfp8": ({}, {}),
    "nvfp4": ({}, {}),
}
# Formats with a product that a CPU has; the others are dequantized there.
PRODUCTS = {
    "int8_tensorwise": "int8_linear",
    "int8_tensorwise, rotated": "int8_linear",
    "convrot_w4a4": "convrot_w4a4_linear",
    "asym_w4a8_int8": "w4a8_int8_linear",
}
FAMILIES = ("Flux", "Wan 2.1", "LTX")


def metadata(name: str, **more: Any) -> torch.Tensor:
    """What a file says of one layer, as `comfy_quant` holds it."""
    about = {"format": name.partition(",")[0], **FORMATS[name][0], **more}
    return torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)


def quantized(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The weights with the matrices of blocks in a format. What the format cannot hold stays as it is."""
    quant_ops = importlib.import_module("comfy.quant_ops")
    layout = quant_ops.QUANT_ALGOS[name.partition(",")[0]]["comfy_tensor_layout"]
    made = dict(weights)
    for key, weight in weights.items():
        if "blocks." not in key or not key.endswith(".weight") or weight.ndim != 2:
            continue
        try:
            parts = quant_ops.QuantizedTensor.from_float(weight, layout, **FORMATS[name][1]).state_dict(key)
        except (ValueError, RuntimeError):  # a width that its groups do not divide
            continue
        made.update(parts)
        made[f"{key.removesuffix('weight')}comfy_quant"] = metadata(name)
    return made


@dataclasses.dataclass(frozen=True)
class QuantizedModel(Model):
    """format: of `FORMATS`. The model computes in `dtype`."""

    format: str = ""
    dtype: torch.dtype = torch.float32
    patchers: list[Any] = dataclasses.field(default_factory=list)  # of the models that were made

    def make(self) -> Any:
        self.patchers.append(self.patcher())
        return self.patchers[-1].model.diffusion_model.eval().requires_grad_(False)

    def patcher(self) -> Any:
        """The model as core's loader makes it, ready to be given a LoRA."""
        weights = {name: value.clone() for name, value in self._by_hand().state_dict().items()}
        about = {"config": json.dumps({"transformer": self.settings})} if self.described else None
        load = importlib.import_module("comfy.sd").load_diffusion_model_state_dict
        return load(quantized(weights, self.format), {"dtype": self.dtype}, about)


def model_of(family: str, name: str) -> QuantizedModel:
    return QuantizedModel(**vars(MODELS[family]), format=name)


def in_full_precision(bench: Any) -> torch.nn.Module:
    """A network with the weights of a bench's quantized model, dequantized."""
    assert isinstance(bench.model, QuantizedModel)
    references = importlib.import_module("resolute_tiny_models.references")
    network: torch.nn.Module = references.in_full_precision(bench.model.patchers[-1].model)
    return network
