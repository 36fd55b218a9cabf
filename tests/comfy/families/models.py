"""Small models of ComfyUI's own classes with random weights, and calls of them at any size.

ComfyUI's loader of diffusion models finds out from the weights which model they are of. So it also makes these, unless
its detection takes a size for granted that no small model has.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Size:
    """batch, latent height and width, tokens of the text, and frames of a video."""

    batch: int
    height: int
    width: int
    text: int
    frames: int = 2


# Odd sizes, batches, lengths of the text and numbers of frames. The first is of one picture: its batch is traced as 2.
FIRST = Size(1, 8, 12, 7)
SIZES = [Size(2, 8, 12, 7), Size(1, 10, 6, 13, 3), Size(3, 14, 8, 7, 5)]
Arguments = dict[str, Any]
TEXT = 32  # the width of a text embedding


@dataclass(frozen=True)
class Model:
    """kind: "module.Class" below comfy.ldm. settings: of a small model. call: the arguments of its forward at a size.

    compiles: distinct blocks. calls: of blocks that are regions, in one forward. described: the loader reads the
    settings from the file's metadata. granted: what detection takes for granted; the class itself makes such a model.
    operations: of ComfyUI's, where the class makes it.
    """

    kind: str
    settings: dict[str, Any]
    call: Callable[[Size], Arguments]
    compiles: int
    calls: int
    block: tuple[str, str] | None = None  # a kind of block that `patches_replace` replaces, and where its image is
    described: bool = False
    granted: str = ""
    operations: str = "disable_weight_init"

    def make(self) -> Any:
        made = self._by_hand()
        if self.granted:
            return made
        weights = made.state_dict()
        metadata = {"config": json.dumps({"transformer": self.settings})} if self.described else None
        load = importlib.import_module("comfy.sd").load_diffusion_model_state_dict
        loaded = load(dict(weights), {"dtype": torch.float32}, metadata).model.diffusion_model
        assert type(loaded) is type(made)
        found = loaded.state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        return loaded.eval().requires_grad_(False)

    def network(self, settings: dict[str, Any], device: str) -> Any:
        module, _, name = self.kind.rpartition(".")
        operations = getattr(importlib.import_module("comfy.ops"), self.operations)
        kind = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
        return kind(**settings, dtype=torch.float32, device=device, operations=operations)

    def _by_hand(self) -> Any:
        torch.manual_seed(0)
        model = self.network(self.settings, "cpu")
        for tensor in (*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())):
            torch.nn.init.normal_(tensor, std=0.05)
        return model.eval().requires_grad_(False)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def image(channels: int, **more: Callable[[Size], Any]) -> Callable[[Size], Arguments]:
    """Arguments of a model of images: the latent, the time and the text."""

    def call(size: Size) -> Arguments:
        given = {
            "x": noise(size.batch, channels, size.height, size.width),
            "timestep": torch.rand(size.batch),
            "context": noise(size.batch, size.text, TEXT),
        }
        return {**given, **{name: make(size) for name, make in more.items()}}

    return call


def video(channels: int, **more: Callable[[Size], Any]) -> Callable[[Size], Arguments]:
    def call(size: Size) -> Arguments:
        x = noise(size.batch, channels, size.frames, size.height, size.width)
        return {**image(channels, **more)(size), "x": x}

    return call


def pooled(size: Size) -> torch.Tensor:
    return noise(size.batch, TEXT)


def pooled_of(width: int) -> Callable[[Size], torch.Tensor]:
    return lambda size: noise(size.batch, width)


def guidance(size: Size) -> torch.Tensor:
    return torch.ones(size.batch)


def reference(channels: int, *shape: int) -> Callable[[Size], Any]:
    """One reference latent, of another size than the latent."""
    return lambda size: [noise(size.batch, channels, *shape, size.height + 2, size.width)]


FLUX: dict[str, Any] = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": TEXT, "context_in_dim": TEXT,
    "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56], "theta": 10000, "txt_ids_dims": [], "patch_size": 2, "qkv_bias": True,
    "guidance_embed": True,
}  # fmt: skip
FLUX2 = {
    **FLUX, "image_model": "flux2", "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "mlp_ratio": 3.0,
    "axes_dim": [32, 32, 32, 32], "theta": 2000, "txt_ids_dims": [3], "patch_size": 1, "qkv_bias": False,
    "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
}  # fmt: skip
CHROMA = {
    **{name: value for name, value in FLUX.items() if name != "guidance_embed"},
    "image_model": "chroma", "in_channels": 64, "vec_in_dim": None, "in_dim": 64, "out_dim": 256, "hidden_dim": 64,
    "n_layers": 1,
}  # fmt: skip
LUMINA: dict[str, Any] = {
    "patch_size": 2, "in_channels": 16, "dim": 64, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2,
    "multiple_of": 32, "ffn_dim_multiplier": 1.0, "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [8, 12, 12],
    "axes_lens": [300, 512, 512],
}  # fmt: skip
Z_IMAGE = {
    **LUMINA, "dim": 256, "axes_dims": [32, 48, 48], "z_image_modulation": True, "time_scale": 1000.0,
    "rope_theta": 256.0, "pad_tokens_multiple": 8,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "in_channels": 64, "num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": TEXT,
    "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
WAN: dict[str, Any] = {
    "model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 16, "dim": 256, "ffn_dim": 96, "freq_dim": 256,
    "text_dim": 4096, "out_dim": 16, "num_heads": 2, "num_layers": 2, "cross_attn_norm": True,
}  # fmt: skip
LTX: dict[str, Any] = {
    "in_channels": 16, "cross_attention_dim": 64, "attention_head_dim": 32, "num_attention_heads": 2,
    "caption_channels": TEXT, "num_layers": 2,
}  # fmt: skip
KREA2: dict[str, Any] = {
    "features": 256, "txtdim": 80, "heads": 2, "kvheads": 1, "layers": 2, "txtlayers": 2,
}  # fmt: skip
SD3: dict[str, Any] = {
    "input_size": None, "pos_embed_scaling_factor": None, "pos_embed_offset": None, "pos_embed_max_size": 32,
    "patch_size": 2, "in_channels": 16, "depth": 3, "num_patches": 1024, "adm_in_channels": TEXT, "qk_norm": "rms",
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": 192}},
}  # fmt: skip
AURA: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "patch_size": 2, "dim": 64, "n_layers": 4, "n_double_layers": 2, "n_heads": 2,
    "cond_seq_dim": TEXT, "max_seq": 1024,
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    **{name: value for name, value in FLUX.items() if name != "txt_ids_dims"},
    "image_model": "hunyuan_video", "vec_in_dim": 768, "theta": 256, "patch_size": [1, 2, 2], "byt5": False,
    "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip


HUNYUAN15 = {
    **HUNYUAN, "vec_in_dim": None, "guidance_embed": False, "use_cond_type_embedding": True,
    "vision_in_dim": 1152, "meanflow_sum": True, "depth_single_blocks": 0,
}  # fmt: skip
LTX_AV = {
    **LTX, "audio_in_channels": 128, "audio_cross_attention_dim": 64, "audio_attention_head_dim": 32,
    "audio_num_attention_heads": 2, "connector_attention_head_dim": 16, "connector_num_attention_heads": 2,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "hidden_size": 64, "num_layers": 2, "token_refiner_num_layers": 2, "num_attention_heads": 2,
    "attention_head_dim": 128, "ffn_hidden_size": 96, "text_dim": TEXT, "timestep_input_dim": 32,
    "time_embed_hidden_size": 64, "time_embed_dim": 32,
}  # fmt: skip
HIDREAM: dict[str, Any] = {
    "patch_size": 2, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32,
    "num_attention_heads": 2, "caption_channels": [TEXT, 48], "text_emb_dim": TEXT, "axes_dims_rope": (16, 8, 8),
    "max_resolution": (32, 32), "llama_layers": [0, 1, 1, 1],
}  # fmt: skip
HUNYUAN_3D: dict[str, Any] = {
    "in_channels": 16, "hidden_size": 64, "context_dim": 1024, "depth": 7, "num_heads": 16,
    "guidance_cond_proj_dim": None,
}  # fmt: skip
SVD: dict[str, Any] = {
    "image_size": 32, "in_channels": 8, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1],
    "channel_mult": [1, 1], "transformer_depth": [1, 0], "transformer_depth_output": [1, 1, 0, 0],
    "transformer_depth_middle": 1, "use_spatial_transformer": True, "use_linear_in_transformer": True, "legacy": False,
    "num_heads": -1, "num_head_channels": 16, "context_dim": TEXT, "adm_in_channels": TEXT,
    "num_classes": "sequential", "extra_ff_mix_layer": True, "use_spatial_context": True,
    "merge_strategy": "learned_with_images", "merge_factor": 0.0, "video_kernel_size": [3, 1, 1],
    "use_temporal_resblock": True, "use_temporal_attention": True, "disable_temporal_crossattention": False,
}  # fmt: skip


def text_of(width: int) -> Callable[[Size], torch.Tensor]:
    return lambda size: noise(size.batch, size.text, width)


def frames(size: Size) -> Arguments:
    """Each frame is a picture of the batch. The context is the embedding of a picture."""
    pictures = Size(size.batch * size.frames, size.height, size.width, 1)
    return {**image(8, y=pooled)(pictures), "num_video_frames": size.frames}


def shape(size: Size) -> Arguments:
    """A latent of tokens, from which a solid is made, and the tokens of a picture."""
    return {**image(16, context=text_of(1024))(size), "x": noise(size.batch, 16, size.height * size.width)}


def llama(size: Size) -> torch.Tensor:
    """The hidden states of two layers of a language model."""
    return noise(size.batch, 2, size.text, 48)


def clip_vision(size: Size) -> torch.Tensor:
    return noise(size.batch, 257, 1280)


def vace_context(size: Size) -> torch.Tensor:
    return noise(size.batch, 1, 8, size.frames, size.height, size.width)


def mask(size: Size) -> torch.Tensor:
    """The last token of the text is padding."""
    kept = torch.ones(size.batch, size.text, dtype=torch.int64)
    kept[:, -1] = 0
    return kept


def av(size: Size) -> Arguments:
    """A video and its sound."""
    given = video(16)(size)
    return {
        **given,
        "x": [given["x"], noise(size.batch, 8, 4 + size.frames, 16)],
        "context": noise(size.batch, size.text, 2 * TEXT),
        "attention_mask": None,
    }


def minimax(size: Size) -> Arguments:
    """H3 takes one video at a time, and its sound."""
    return {
        "x": [noise(1, 24, size.frames, size.height, size.width), noise(1, 32, 2, 6 + size.text)],
        "timestep": torch.rand(1) * 900,
        "context": noise(1, size.text, 64),
    }


QWEN_SIZES = "24 heads and the text's width, 3584"

MODELS = {
    "Z-Image": Model(
        "lumina.model.NextDiT", Z_IMAGE, image(16, num_tokens=lambda size: size.text), compiles=2, calls=6,
        granted="the widths 2304 and 3840",
    ),
    "Lumina 2": Model(
        "lumina.model.NextDiT", LUMINA, image(16, num_tokens=lambda size: size.text), compiles=2, calls=6,
        granted="the widths 2304 and 3840",
    ),
    "Wan 2.1": Model("wan.model.WanModel", WAN, video(16, context=text_of(4096)), 1, 2, ("double_block", "img")),
    "Wan 2.1 I2V": Model(
        "wan.model.WanModel", {**WAN, "model_type": "i2v", "in_dim": 36},
        video(36, context=text_of(4096), clip_fea=clip_vision), 1, 2,
        ("double_block", "img"),
    ),
    # A time for each frame, as in Wan 2.2 5B and where frames of a picture are given.
    "Wan 2.2": Model(
        "wan.model.WanModel", WAN,
        video(16, context=text_of(4096), timestep=lambda size: torch.rand(size.batch, size.frames)), 1, 2,
        ("double_block", "img"),
    ),
    "Wan VACE": Model(
        "wan.model.VaceWanModel", {**WAN, "model_type": "vace", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 8},
        video(16, context=text_of(4096), vace_context=vace_context, vace_strength=lambda size: [0.8]), 3, 6,
        ("double_block", "img"),
    ),
    "Qwen-Image": Model(
        "qwen_image.model.QwenImageTransformer2DModel", QWEN, video(16), 1, 2, ("double_block", "img"),
        granted=QWEN_SIZES,
    ),
    "Qwen-Image-Edit": Model(
        "qwen_image.model.QwenImageTransformer2DModel", QWEN, video(16, ref_latents=reference(16, 1)), 1, 2,
        ("double_block", "img"), granted=QWEN_SIZES,
    ),
    # The reference has a time of its own, so the block gets the number of the picture's tokens.
    "Qwen-Image-Edit, time 0": Model(
        "qwen_image.model.QwenImageTransformer2DModel", QWEN,
        video(16, ref_latents=reference(16, 1), ref_latents_method=lambda size: "index_timestep_zero"), 1, 2,
        granted=QWEN_SIZES,
    ),
    "Qwen-Image, masked": Model(
        "qwen_image.model.QwenImageTransformer2DModel", QWEN, video(16, attention_mask=mask), 1, 2, granted=QWEN_SIZES
    ),
    "LTX, masked": Model("lightricks.model.LTXVModel", LTX, video(16, attention_mask=mask), 1, 2, described=True),
    "LTX AV": Model("lightricks.av_model.LTXAVModel", LTX_AV, av, 1, 2, described=True),
    "MiniMax H3": Model("minimax.model.MiniMaxH3Model", MINIMAX, minimax, 1, 2),
    "LTX": Model(
        "lightricks.model.LTXVModel", LTX, video(16, attention_mask=lambda size: None), 1, 2, ("double_block", "img"),
        described=True,
    ),
    "Flux": Model("flux.model.Flux", FLUX, image(16, y=pooled, guidance=guidance), 2, 4, ("single_block", "img")),
    "Kontext": Model(
        "flux.model.Flux", FLUX, image(16, y=pooled, guidance=guidance, ref_latents=reference(16)), 2, 4,
        ("double_block", "img"),
    ),
    "Flux 2": Model("flux.model.Flux", FLUX2, image(128, guidance=guidance), 2, 4, ("double_block", "img")),
    "Krea 2": Model("krea2.model.SingleStreamDiT", KREA2, image(16, context=text_of(160)), 2, 6),
    "SD3.5": Model(
        "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper", SD3, image(16, y=pooled), 2, 3,
        ("double_block", "img"),
    ),
    "Chroma": Model(
        "chroma.model.Chroma", CHROMA, image(16, guidance=guidance), 2, 4, ("double_block", "img"),
        granted="the sizes of its guidance layer, 5120 and 3072",
    ),
    "HunyuanVideo": Model(
        "hunyuan_video.model.HunyuanVideo", HUNYUAN, video(16, y=pooled_of(768), guidance=guidance), 3, 6,
        ("double_block", "img"),
    ),
    "HunyuanVideo 1.5": Model(
        "hunyuan_video.model.HunyuanVideo", HUNYUAN15,
        video(16, clip_fea=lambda size: noise(size.batch, 9, 1152), attention_mask=lambda size: None), 2, 4,
        ("double_block", "img"),
    ),
    # A region before the experts of each block, one after them, and the expert that all tokens run through.
    "HiDream": Model(
        "hidream.model.HiDreamImageTransformer2DModel", HIDREAM,
        image(16, y=pooled, encoder_hidden_states_llama3=llama), 5, 12,
        granted="all its sizes, 17 billion weights",
    ),
    "Hunyuan3D 2.1": Model("hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain", HUNYUAN_3D, shape, 6, 19),
    "SVD": Model(
        "modules.diffusionmodules.openaimodel.UNetModel", SVD, frames, 8, 29,
        granted="320 channels and its number of blocks",
    ),
    "AuraFlow": Model("aura.mmdit.MMDiT", AURA, image(4), 2, 4, ("double_block", "img"), granted="the width 3072"),
}  # fmt: skip
