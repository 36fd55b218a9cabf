"""Stock node types of the workflows with transformers, as in ComfyUI 0.33.0. Optional inputs may be left out."""

from __future__ import annotations

from .node_type import AFTER_GENERATE, NodeType, Slot, Widget


def _size(width: int, height: int) -> tuple[Widget, Widget]:
    return Widget("width", "INT", width), Widget("height", "INT", height)


_MODEL, _LATENT = ("MODEL", "MODEL"), ("LATENT", "LATENT")
_PROMPTS: tuple[Slot, Slot] = (("positive", "CONDITIONING"), ("negative", "CONDITIONING"))
_BATCH, _SHIFT = Widget("batch_size", "INT", 1), Widget("shift", "FLOAT", 3.0)

FAMILY_NODES = (
    NodeType(
        "UNETLoader",
        "Load Diffusion Model",
        widgets=(Widget("unet_name", "COMBO", ""), Widget("weight_dtype", "COMBO", "default")),
        outputs=(_MODEL,),
    ),
    NodeType(
        "CLIPLoader",
        "Load CLIP",
        widgets=(
            Widget("clip_name", "COMBO", ""),
            Widget("type", "COMBO", "stable_diffusion"),
            Widget("device", "COMBO", "default"),
        ),
        outputs=(("CLIP", "CLIP"),),
    ),
    NodeType(
        "DualCLIPLoader",
        "Load CLIP (Dual)",
        widgets=(
            Widget("clip_name1", "COMBO", ""),
            Widget("clip_name2", "COMBO", ""),
            Widget("type", "COMBO", "flux"),
            Widget("device", "COMBO", "default"),
        ),
        outputs=(("CLIP", "CLIP"),),
    ),
    NodeType("VAELoader", "Load VAE", widgets=(Widget("vae_name", "COMBO", ""),), outputs=(("VAE", "VAE"),)),
    NodeType(
        "ConditioningZeroOut",
        "Conditioning Zero Out",
        inputs=(("conditioning", "CONDITIONING"),),
        outputs=(("CONDITIONING", "CONDITIONING"),),
    ),
    NodeType("ModelSamplingAuraFlow", "ModelSamplingAuraFlow", (("model", "MODEL"),), (_SHIFT,), (_MODEL,)),
    NodeType("ModelSamplingSD3", "ModelSamplingSD3", (("model", "MODEL"),), (_SHIFT,), (_MODEL,)),
    NodeType("EmptySD3LatentImage", "EmptySD3LatentImage", widgets=(*_size(1024, 1024), _BATCH), outputs=(_LATENT,)),
    NodeType(
        "Wan22ImageToVideoLatent",
        "Wan22ImageToVideoLatent",
        inputs=(("vae", "VAE"),),
        widgets=(*_size(1280, 704), Widget("length", "INT", 49), _BATCH),
        outputs=(_LATENT,),
    ),
    NodeType(
        "EmptyLTXVLatentVideo",
        "EmptyLTXVLatentVideo",
        widgets=(*_size(768, 512), Widget("length", "INT", 97), _BATCH),
        outputs=(_LATENT,),
    ),
    NodeType(
        "LTXVConditioning",
        "LTXVConditioning",
        inputs=_PROMPTS,
        widgets=(Widget("frame_rate", "FLOAT", 25.0),),
        outputs=_PROMPTS,
    ),
    NodeType(
        "LTXVScheduler",
        "LTXVScheduler",
        inputs=(("latent", "LATENT"),),
        widgets=(
            Widget("steps", "INT", 20),
            Widget("max_shift", "FLOAT", 2.05),
            Widget("base_shift", "FLOAT", 0.95),
            Widget("stretch", "BOOLEAN", True),
            Widget("terminal", "FLOAT", 0.1),
        ),
        outputs=(("SIGMAS", "SIGMAS"),),
    ),
    NodeType(
        "KSamplerSelect",
        "KSamplerSelect",
        widgets=(Widget("sampler_name", "COMBO", "euler"),),
        outputs=(("SAMPLER", "SAMPLER"),),
    ),
    NodeType(
        "SamplerCustom",
        "SamplerCustom",
        inputs=(
            ("model", "MODEL"),
            *_PROMPTS,
            ("sampler", "SAMPLER"),
            ("sigmas", "SIGMAS"),
            ("latent_image", "LATENT"),
        ),
        widgets=(
            Widget("add_noise", "BOOLEAN", True),
            Widget("noise_seed", "INT", 0),
            Widget(AFTER_GENERATE, "COMBO", "fixed"),
            Widget("cfg", "FLOAT", 8.0),
        ),
        outputs=(("output", "LATENT"), ("denoised_output", "LATENT")),
    ),
    NodeType(
        "CreateVideo",
        "Create Video",
        inputs=(("images", "IMAGE"),),
        widgets=(Widget("fps", "FLOAT", 30.0),),
        outputs=(("VIDEO", "VIDEO"),),
        unused=2,  # audio, bit_depth
    ),
    NodeType(
        "SaveVideo",
        "Save Video",
        inputs=(("video", "VIDEO"),),
        widgets=(
            Widget("filename_prefix", "STRING", "video/ComfyUI"),
            Widget("format", "COMBO", "auto"),
            Widget("codec", "COMFY_DYNAMICCOMBO_V3", "auto"),
        ),
    ),
)
