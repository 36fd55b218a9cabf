"""Small transformers of ComfyUI's own families. Its detection takes some of their widths for granted, so the loaders of
model files cannot make them.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from .formats import quantized
from .node import SEED, Node
from .noise import fill

TEXT = 32  # the width of the embeddings that they take
INT8 = ("z-image-int8",)  # kinds whose blocks have weights in int8, as in Comfy-Org's files
# The class in `comfy.supported_models` and the settings of the network.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "Flux",
        {
            "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": TEXT, "context_in_dim": TEXT,
            "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
            "axes_dim": [8, 12, 12], "theta": 10000, "txt_ids_dims": [], "patch_size": 2, "qkv_bias": True,
            "guidance_embed": True,
        },
    ),
    "qwen-image": (
        "QwenImage",
        {
            "image_model": "qwen_image", "in_channels": 64, "num_layers": 2, "attention_head_dim": 32,
            "num_attention_heads": 2, "joint_attention_dim": TEXT, "axes_dims_rope": (8, 12, 12),
        },
    ),
    "wan2.1": (
        "WAN21_T2V",
        {
            "image_model": "wan2.1", "model_type": "t2v", "in_dim": 16, "dim": 64, "ffn_dim": 96, "freq_dim": 32,
            "text_dim": TEXT, "out_dim": 16, "num_heads": 2, "num_layers": 2, "cross_attn_norm": True,
        },
    ),
    "z-image-int8": (
        "ZImage",
        {
            "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 256, "n_layers": 2,
            "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2, "multiple_of": 32, "ffn_dim_multiplier": 1.0,
            "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [32, 48, 48], "axes_lens": [300, 512, 512],
            "z_image_modulation": True, "time_scale": 1000.0, "rope_theta": 256.0, "pad_tokens_multiple": 8,
        },
    ),
    "wan2.2": (
        "WAN22_T2V",
        {
            "image_model": "wan2.1", "model_type": "t2v", "in_dim": 48, "dim": 64, "ffn_dim": 96, "freq_dim": 32,
            "text_dim": TEXT, "out_dim": 48, "num_heads": 2, "num_layers": 2, "cross_attn_norm": True,
        },
    ),
}  # fmt: skip


class ResoluteTestTransformer(Node):
    """A transformer of two blocks with random weights."""

    FUNCTION = "build"
    INPUTS = {
        "seed": SEED,
        "kind": (list(KINDS), {"default": "flux"}),
    }

    def build(self, seed: int, kind: str) -> tuple[Any]:
        """Build the model like ComfyUI's loader of diffusion models."""
        name, settings = KINDS[kind]
        config = getattr(comfy.supported_models, name)(dict(settings))
        config.set_inference_dtype(torch.float32, None)
        if kind in INT8:
            config.quant_config = {"mixed_ops": True}
        device = comfy.model_management.unet_offload_device()
        model = config.get_model({}, "", device=device)
        patcher_class = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        load_device = comfy.model_management.get_torch_device()
        patcher = patcher_class(model, load_device=load_device, offload_device=device)
        weights = fill(model.diffusion_model, seed)
        if kind in INT8:
            weights = quantized(weights, "int8_tensorwise", "layers.")
        model.diffusion_model.load_state_dict(weights, strict=True, assign=True)
        model.diffusion_model.eval().requires_grad_(False)
        return (patcher,)
