"""A UNet of about 4 MB and a VAE of about 1 MB, of the same classes as real ones."""

from __future__ import annotations

import inspect
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import comfy.supported_models_base
import torch

from .node import SEED, Node
from .noise import fill

UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 2, 2],
    "transformer_depth": [1, 1, 0],
    "transformer_depth_output": [1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": False,
    "use_checkpoint": False,
    "legacy": False,
    "context_dim": 768,
    "num_heads": 4,
    "num_head_channels": -1,
    "adm_in_channels": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "sd": {},
    "sdxl": {"context_dim": 2048, "adm_in_channels": 2816, "num_classes": "sequential"},
    # One level instead of three: fewer regions to compile.
    "small": {"num_res_blocks": [1], "channel_mult": [1], "transformer_depth": [1], "transformer_depth_output": [1, 1]},
}
VAE: dict[str, Any] = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}


class ResoluteTestTinyModel(Node):
    """A tiny UNet of the SD1.5 or the SDXL family."""

    FUNCTION = "build"
    INPUTS = {
        "seed": SEED,
        "kind": (list(KINDS), {"default": "sd"}),
    }

    def build(self, seed: int, kind: str) -> tuple[Any]:
        """Build the model like ComfyUI's checkpoint loader."""
        return (_patcher(seed, kind),)


class ResoluteTestTinyVAE(Node):
    """A small AutoencoderKL, encoder and decoder."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "build"
    INPUTS = {"seed": SEED}

    def build(self, seed: int) -> tuple[Any]:
        """Build the VAE with ComfyUI's own class from a random state dict."""
        return (_vae(seed),)


class ResoluteTestFloat32VAE(Node):
    """The tiny VAE with weights as ComfyUI rounds them, computing in float32."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "build"
    INPUTS = {"seed": SEED}

    def build(self, seed: int) -> tuple[Any]:
        """Build the VAE; its weights were rounded to the dtype that ComfyUI chooses on this device."""
        return (_vae(seed, _vae(seed).vae_dtype),)


def _vae(seed: int, rounded: torch.dtype | None = None) -> Any:
    """rounded: a dtype for the weights, which then compute in float32. Without it ComfyUI chooses the dtype."""
    config = {"params": {"ddconfig": dict(VAE), "embed_dim": 4}}
    weights = fill(comfy.sd.AutoencoderKL(**config["params"]), seed)
    if rounded is None:
        return comfy.sd.VAE(sd=weights, config=config)
    weights = {name: weight.to(rounded).float() for name, weight in weights.items()}
    return comfy.sd.VAE(sd=weights, config=config, dtype=torch.float32)


def _patcher(seed: int, kind: str, disable_dynamic: bool = False) -> Any:
    config = _config(kind)
    load_device = comfy.model_management.get_torch_device()
    offload_device = comfy.model_management.unet_offload_device()
    family = comfy.model_base.SDXL if kind == "sdxl" else comfy.model_base.BaseModel
    model = family(config, device=offload_device)
    # ComfyUI 0.8.0 has one patcher class; later versions have another on NVIDIA, which pages weights.
    patcher_class = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    if disable_dynamic:
        patcher_class = comfy.model_patcher.ModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    options = {}
    if "assign" in inspect.signature(model.load_model_weights).parameters:
        options["assign"] = patcher.is_dynamic()
    dtype = model.get_dtype()
    weights = {name: weight.to(dtype) for name, weight in fill(model.diffusion_model, seed).items()}
    model.load_model_weights(weights, "", **options)
    # Core calls this to make another copy of the model; its own loaders set it too.
    patcher.cached_patcher_init = (_patcher, (seed, kind))
    return patcher


def sd15_config(unet: dict[str, Any]) -> Any:
    """The settings of an SD1.5 model with another UNet; its format is not chosen yet."""
    config = comfy.supported_models_base.BASE(unet)
    config.unet_config.update(num_heads=4, num_head_channels=-1)
    config.latent_format = comfy.supported_models.SD15.latent_format()
    config.memory_usage_factor = 1.0
    return config


def in_its_format(config: Any) -> Any:
    """The same settings with the format that core would choose on this device."""
    device = comfy.model_management.get_torch_device()
    dtype = comfy.model_management.unet_dtype(device=device, supported_dtypes=config.supported_inference_dtypes)
    assert isinstance(dtype, torch.dtype)
    config.set_inference_dtype(dtype, None)
    return config


def _config(kind: str) -> Any:
    unet = {**UNET, **KINDS[kind]}
    if kind != "sdxl":
        return in_its_format(sd15_config(unet))
    config = comfy.supported_models.SDXL(unet)
    config.unet_config.update(num_heads=4, num_head_channels=-1)
    config.memory_usage_factor = 1.0
    return in_its_format(config)
