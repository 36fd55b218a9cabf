"""Names and shapes of the weights of each model kind, from ComfyUI's own classes.

The modules are built on the meta device, so nothing is allocated or run.
Needs torch and a ComfyUI checkout to be importable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]

UNET: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
    "use_checkpoint": False, "legacy": False,
}  # fmt: skip
SD15 = {
    **UNET, "context_dim": 768, "num_heads": 8, "use_linear_in_transformer": False, "adm_in_channels": None,
    "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "transformer_depth_middle": 1,
}  # fmt: skip
# One block per level, the same width at all levels, three resolutions, attention at two of them.
SD15_MINI = {
    **SD15, "num_res_blocks": [1, 1, 1], "channel_mult": [1, 1, 1], "transformer_depth": [1, 1, 0],
    "transformer_depth_output": [1, 1, 1, 1, 0, 0],
}  # fmt: skip
SDXL = {
    **UNET, "context_dim": 2048, "num_head_channels": 64, "use_linear_in_transformer": True,
    "num_classes": "sequential", "adm_in_channels": 2816, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
}  # fmt: skip
# ComfyUI recognises SDXL by the transformer depths of the input blocks; the other depths may be smaller.
SDXL_MINI = {
    **SDXL,
    "channel_mult": [1, 1, 1],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
}
VAE: dict[str, Any] = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
# Of a UNet's settings, those that a ControlNet, which is its first half, does not have.
_DECODER_ONLY = {"out_channels", "transformer_depth_output"}
SD3: dict[str, Any] = {
    "input_size": None, "patch_size": 2, "in_channels": 16, "depth": 2, "num_patches": 576, "pos_embed_max_size": 24,
    "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}},
}  # fmt: skip
FLUX: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 128,
    "mlp_ratio": 4.0, "num_heads": 1, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 10000,
    "patch_size": 2, "txt_ids_dims": [], "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
KLEIN: dict[str, Any] = {
    **FLUX, "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 7680, "mlp_ratio": 3.0,
    "axes_dim": [32, 32, 32, 32], "theta": 2000, "patch_size": 1, "txt_ids_dims": [3], "qkv_bias": False,
    "guidance_embed": False, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
}  # fmt: skip


def state_dict_shapes(kind: str) -> Shapes:
    """Name -> shape of every weight in the file of ``kind``, a key of models.KINDS."""
    _prefer_cpu()
    return _BUILDERS[kind]()


def _sd15(unet: dict[str, Any], decoder_channels: int) -> Shapes:
    shapes = _unet(unet)
    shapes.update(_vae(decoder_channels))
    shapes.update(_clip_l("cond_stage_model.transformer."))
    return shapes


def _sdxl_mini() -> Shapes:
    return {**_unet(SDXL_MINI), **_vae(32)}


def _sdxl() -> Shapes:
    shapes = {**_unet(SDXL), **_vae(128)}
    shapes.update(_clip_l("conditioner.embedders.0.transformer."))
    shapes.update(_clip_g("conditioner.embedders.1.model."))
    return shapes


def _controlnet(unet: dict[str, Any]) -> Shapes:
    import comfy.cldm.cldm
    import comfy.ops

    config = {name: value for name, value in unet.items() if name not in _DECODER_ONLY}
    operations = comfy.ops.disable_weight_init
    model = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, device="meta", operations=operations)
    return _shapes(model, "")


def _sd3_tiny() -> Shapes:
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit
    import comfy.ops

    model = mmdit.MMDiT(device="meta", operations=comfy.ops.disable_weight_init, **SD3)
    return {**_shapes(model, "model.diffusion_model."), **_vae(32, SD3["in_channels"])}


def _flux(config: dict[str, Any]) -> Shapes:
    import comfy.ldm.flux.model
    import comfy.ops

    model = comfy.ldm.flux.model.Flux(dtype=None, device="meta", operations=comfy.ops.disable_weight_init, **config)
    return _shapes(model, "")


_BUILDERS: dict[str, Callable[[], Shapes]] = {
    "sd15-mini": lambda: _sd15(SD15_MINI, 32),
    "sd15-mini-full-vae": lambda: _sd15(SD15_MINI, 128),
    "sd15": lambda: _sd15(SD15, 128),
    "sdxl-mini": _sdxl_mini,
    "sdxl": _sdxl,
    "sd15-mini-controlnet": lambda: _controlnet(SD15_MINI),
    "sdxl-controlnet": lambda: _controlnet(SDXL),
    "sd3-tiny": _sd3_tiny,
    "flux-tiny": lambda: _flux(FLUX),
    "klein-tiny": lambda: _flux(KLEIN),
}


def _unet(config: dict[str, Any]) -> Shapes:
    import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
    import comfy.ops

    model = openaimodel.UNetModel(**config, device="meta", operations=comfy.ops.disable_weight_init)
    return _shapes(model, "model.diffusion_model.")


def _vae(decoder_channels: int, z_channels: int = 4) -> Shapes:
    """ComfyUI's encoder always has 128 channels; version 0.33 reads the decoder's channels from the file."""
    import comfy.ldm.models.autoencoder as autoencoder

    config = {**VAE, "z_channels": z_channels}
    decoder = {**config, "ch": decoder_channels}
    with torch.device("meta"):
        model = autoencoder.AutoencoderKL(ddconfig=config, decoder_ddconfig=decoder, embed_dim=z_channels)
    return _shapes(model, "first_stage_model.")


def _clip_l(prefix: str) -> Shapes:
    """CLIP ViT-L/14's text model, with the names of an SD checkpoint."""
    shapes = _shapes(_clip("sd1_clip_config.json"), prefix)
    shapes.pop(prefix + "text_projection.weight")
    return shapes


def _clip_g(prefix: str) -> Shapes:
    """CLIP ViT-bigG's text model, with OpenCLIP's names: q, k and v in one matrix."""
    source = _shapes(_clip("clip_config_bigg.json"), "")
    renamed = {
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
        "text_model.final_layer_norm.weight": "ln_final.weight",
        "text_model.final_layer_norm.bias": "ln_final.bias",
        "text_projection.weight": "text_projection",
    }
    parts = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "self_attn.out_proj": "attn.out_proj",
    }
    shapes: Shapes = {}
    for name, shape in source.items():
        if name in renamed:
            shapes[prefix + renamed[name]] = shape
            continue
        layer, _, rest = name.removeprefix("text_model.encoder.layers.").partition(".")
        part, _, leaf = rest.rpartition(".")
        block = f"{prefix}transformer.resblocks.{layer}."
        if part == "self_attn.q_proj":
            shapes[f"{block}attn.in_proj_{leaf}"] = (3 * shape[0], *shape[1:])
        elif part in parts:
            shapes[f"{block}{parts[part]}.{leaf}"] = shape
    return shapes


def _clip(config_file: str) -> torch.nn.Module:
    import json
    from pathlib import Path

    import comfy.clip_model
    import comfy.ops

    config = json.loads((Path(comfy.clip_model.__file__).parent / config_file).read_text("utf-8"))
    model: torch.nn.Module = comfy.clip_model.CLIPTextModel(
        config, torch.float16, "meta", comfy.ops.disable_weight_init
    )
    return model


def _shapes(module: torch.nn.Module, prefix: str) -> Shapes:
    return {prefix + name: tuple(value.shape) for name, value in module.state_dict().items()}


def _prefer_cpu() -> None:
    """ComfyUI asks CUDA for a device at import; only shapes are read here."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
