"""A model's result in full precision, from the same weights: what errors of quantized models are measured against."""

from __future__ import annotations

import dataclasses
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.patcher_extension
import torch

from .node import Node


class ResoluteTestReferenceModel(Node):
    """The model computed in float32, its quantized weights dequantized."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",)}

    def patch(self, model: Any) -> tuple[Any]:
        """Put a network in float32 in place of the model's own."""
        network = in_full_precision(model.model)

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            x = args[0]
            result = network._forward(*_as_float(args), **_as_float(kwargs))
            return result.to(x.dtype)

        patched = model.clone()
        patched.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, call)
        return (patched,)


def in_full_precision(base: Any) -> torch.nn.Module:
    """A network with the weights of a loaded model, in float32, on the device that computes."""
    own, device = base.diffusion_model, comfy.model_management.get_torch_device()
    settings = {
        key: value for key, value in base.model_config.unet_config.items() if key != "disable_unet_model_creation"
    }
    settings["dtype"] = torch.float32
    with torch.inference_mode(False):
        made = type(own)(**settings, device=device, operations=comfy.ops.disable_weight_init)
        weights = dict(own.named_parameters()) | dict(own.named_buffers())
        missing = made.state_dict().keys() - weights.keys()
        assert not missing, sorted(missing)
        # Not those that `made` names: with DynamicVRAM core's modules begin without weights.
        for name, weight in weights.items():
            module, _, attribute = name.rpartition(".")
            value = _in_float(own.get_submodule(module), weight.detach().to(device))
            place = made.get_submodule(module)
            kept: Any = torch.nn.Parameter(value, False) if attribute in place._parameters else value
            setattr(place, attribute, kept)
    return made.eval().requires_grad_(False)


def _in_float(module: Any, weight: Any) -> torch.Tensor:
    if hasattr(weight, "_layout_cls"):  # core's QuantizedTensor: dequantized in the dtype of its parameters
        params = dataclasses.replace(weight._params, orig_dtype=torch.float32)
        weight = type(weight)(weight._qdata, weight._layout_cls, params).dequantize()
    if getattr(weight, "tensor_type", None) is not None:  # of a GGUF file: its layer decodes it, in float16 by default
        decoding, module.dequant_dtype = module.dequant_dtype, torch.float32
        weight = torch.Tensor(module.get_weight(weight, torch.float32))
        module.dequant_dtype = decoding
    result: torch.Tensor = weight.float() if weight.is_floating_point() else weight
    return result.clone()


def _as_float(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_float, value))
    if isinstance(value, dict):
        return {key: value[key] if key == "transformer_options" else _as_float(value[key]) for key in value}
    return value
