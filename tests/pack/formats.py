"""Models as on other machines: weights in another format, and little free memory."""

from __future__ import annotations

import json
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.quant_ops
import comfy.supported_models
import comfy.supported_models_base
import torch

from .models import KINDS, UNET, sd15_config
from .node import SEED, Node, whole
from .noise import fill

FORMATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Formats of core's QuantizedTensor, in transformer blocks alone: each weight is numbers of 8 bits and a scale.
QUANTIZED = ("float8_e4m3fn", "int8_tensorwise")


# One level and one transformer: each kind of block only once, because each format compiles all of them again.
SMALL: dict[str, Any] = {**UNET, **KINDS["small"], "transformer_depth_output": [0, 0]}


class ResoluteTestFormatModel(Node):
    """An SD1.5 UNet with weights in a given format; the same seed gives the same numbers, rounded to the format.

    As with core's loader, the model computes in the format if the device supports it; otherwise weights are cast.
    """

    FUNCTION = "build"
    INPUTS = {
        "seed": SEED,
        "weights": ([*FORMATS, *QUANTIZED],),
    }

    def build(self, seed: int, weights: str) -> tuple[Any]:
        """Build it like the tiny model."""
        config = sd15_config(dict(SMALL))
        dtype, load_device = FORMATS.get(weights), comfy.model_management.get_torch_device()
        cast = comfy.model_management.unet_manual_cast(dtype, load_device, config.supported_inference_dtypes)
        if dtype is None:
            dtype, config.quant_config = cast, {"mixed_ops": True}
        config.set_inference_dtype(dtype, cast)
        offload_device = comfy.model_management.unet_offload_device()
        model = comfy.model_base.BaseModel(config, device=offload_device)
        patcher_class = comfy.model_patcher.CoreModelPatcher
        patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
        own = {name: weight.to(dtype) for name, weight in fill(model.diffusion_model, seed).items()}
        if weights in QUANTIZED:
            own = quantized(own, weights, ".transformer_blocks.")
        model.load_model_weights(own, "", assign=patcher.is_dynamic())
        return (patcher,)


def quantized(state: dict[str, torch.Tensor], weights: str, blocks: str) -> dict[str, torch.Tensor]:
    """The state dict with the matrices of blocks in one of ``QUANTIZED``, as core's loader reads them.

    blocks: what the names of their weights have in them.
    """
    storage = comfy.quant_ops.QUANT_ALGOS[weights]["storage_t"]
    most = torch.finfo(storage).max if storage.is_floating_point else torch.iinfo(storage).max
    about = torch.tensor(list(json.dumps({"format": weights}).encode()), dtype=torch.uint8)
    made = dict(state)
    for name, weight in state.items():
        if blocks in name and weight.ndim == 2 and name.endswith(".weight"):
            place = name.removesuffix("weight")
            scale = weight.abs().amax().float() / most
            scaled = weight.float() / scale
            made[name] = (scaled if storage.is_floating_point else scaled.round()).to(storage)
            made |= {f"{place}weight_scale": scale, f"{place}comfy_quant": about.clone()}
    return made


class ResoluteTestFreeMemory(Node):
    """From the k-th step on (0 is the first), core finds no free memory, as if another program used it."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "from_step": whole(0, 0, 1000)}

    def patch(self, model: Any, from_step: int) -> tuple[Any]:
        """Clone the model and override the memory that core finds when it decides the batch size."""

        def call(executor: Any, base: Any, conds: Any, x: Any, timestep: Any, options: Any) -> Any:
            schedule = options["transformer_options"]["sample_sigmas"]
            step = int((schedule > timestep.flatten()[0].to(schedule)).sum())
            if step < from_step:
                return executor(base, conds, x, timestep, options)
            patcher = base.current_patcher
            patcher.get_free_memory = lambda device: 0
            try:
                return executor(base, conds, x, timestep, options)
            finally:
                del patcher.get_free_memory

        patched = model.clone()
        patched.add_wrapper(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, call)
        return (patched,)
