"""Other models than the tiny one, and models that ComfyUI loads only in part."""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.supported_models_base

from .models import UNET, in_its_format, sd15_config
from .node import SEED, Node, whole
from .noise import fill

SHORT: dict[str, Any] = {
    "model_channels": 96,
    "num_res_blocks": [1],
    "channel_mult": [1],
    "transformer_depth": [0],
    "transformer_depth_output": [0, 0],
}
KINDS: dict[str, dict[str, Any]] = {
    # The tiny SD model itself.
    "sd": {},
    # The tiny SD model with five more input channels, for a mask and a masked image.
    "inpaint": {"in_channels": 9},
    # Three kinds of region, and no attention at all.
    "short": {**SHORT, "transformer_depth_middle": -1},
    # The previous one with a transformer block in the middle.
    "attentive": {**SHORT, "transformer_depth_middle": 1},
}


class ResoluteTestOtherModel(Node):
    """A MODEL of one of ``KINDS``, with random weights that are never paged."""

    FUNCTION = "build"
    INPUTS = {
        "seed": SEED,
        "kind": (list(KINDS),),
        "channels": whole(0, 0, 1024),
    }

    def build(self, seed: int, kind: str, channels: int) -> tuple[Any]:
        """Build it like the tiny model. channels: overrides the kind's width unless 0."""
        unet = {**UNET, **KINDS[kind]}
        if channels:
            unet["model_channels"] = channels
        config = in_its_format(sd15_config(unet))
        device = comfy.model_management.get_torch_device()
        offload_device = comfy.model_management.unet_offload_device()
        model = comfy.model_base.BaseModel(config, device=offload_device)
        if config.inpaint_model():
            model.set_inpaint()
        weights = {name: weight.to(model.get_dtype()) for name, weight in fill(model.diffusion_model, seed).items()}
        model.load_model_weights(weights, "")
        return (comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=offload_device),)


class ResoluteTestLowVRAM(Node):
    """Keeps part of a model's weights off the device, as ComfyUI does when memory is short."""

    FUNCTION = "limit"
    INPUTS = {"model": ("MODEL",), "kilobytes_outside": whole(1, 1, 2**40)}

    def limit(self, model: Any, kilobytes_outside: int) -> tuple[Any]:
        """A clone with its own class, which its clones inherit."""
        clone = model.clone()
        own = type(clone)

        class Limited(own):
            def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> Any:
                room = max(0.1, self.model_size() - kilobytes_outside * 1024) - self.loaded_size()
                return super().partially_load(device_to, min(extra_memory, room), force_patch_weights)

        clone.__class__ = Limited
        return (clone,)


class ResoluteTestUnloadInTheMiddle(Node):
    """Unloads half of the weights before one of the steps, as ComfyUI does when another model needs the memory."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "step": whole(1, 0, 1000)}

    def patch(self, model: Any, step: int) -> tuple[Any]:
        """step: 0 is the first."""

        def call(apply_model: Any, arguments: dict[str, Any]) -> Any:
            options, sigma = arguments["c"]["transformer_options"], float(arguments["timestep"].flatten()[0])
            if sum(float(value) > sigma for value in options["sample_sigmas"]) == step:
                patcher = apply_model.__self__.current_patcher
                patcher.partially_unload(patcher.offload_device, patcher.model_size() // 2)
            return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

        patched = model.clone()
        patched.set_model_unet_function_wrapper(call)
        return (patched,)
