"""Stable Video Diffusion without its checkpoint, whose image encoder alone has 1.3 GB."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from .node import SEED, Node
from .noise import fill

# SVD's UNet with fewer and narrower levels; the rest is what core reads from its checkpoint.
UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 8,
    "out_channels": 4,
    "model_channels": 64,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 1],
    "transformer_depth": [1, 0],
    "transformer_depth_output": [1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
    "context_dim": 1024,
    "adm_in_channels": 768,
    "num_classes": "sequential",
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
    "use_temporal_resblock": True,
    "use_temporal_attention": True,
    "disable_temporal_crossattention": False,
}


class Encoder:
    """Stands in for CLIP: the same embedding for every image, of the real width."""

    def encode_image(self, image: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(image_embeds=torch.linspace(-1, 1, 1024).repeat(image.shape[0], 1))


class ResoluteTestSVD(Node):
    """MODEL and CLIP_VISION, as ImageOnlyCheckpointLoader gives them."""

    RETURN_TYPES = ("MODEL", "CLIP_VISION")
    FUNCTION = "build"
    INPUTS = {"seed": SEED}

    def build(self, seed: int) -> tuple[Any, Any]:
        config = comfy.supported_models.SVD_img2vid(dict(UNET))
        config.set_inference_dtype(torch.float32, None)
        device = comfy.model_management.unet_offload_device()
        model = comfy.model_base.SVD_img2vid(config, device=device)
        model.diffusion_model.load_state_dict(fill(model.diffusion_model, seed))
        load_device = comfy.model_management.get_torch_device()
        return comfy.model_patcher.ModelPatcher(model, load_device=load_device, offload_device=device), Encoder()
