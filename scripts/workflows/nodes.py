"""The node types of the bundled workflows: sockets, widgets and titles.

Stock types are as in ComfyUI 0.33.0, Resolute's as in ``nodes/``; a browser test compares
both with a running server. Uses only nodes that ComfyUI 0.8.0 has too.
"""

from __future__ import annotations

from .family_nodes import FAMILY_NODES
from .node_type import AFTER_GENERATE, FRONT_END_ONLY, NOTE, UPLOAD, NodeType, Slot, Widget, WidgetValue

__all__ = ["FRONT_END_ONLY", "NODE_TYPES", "NOTE", "OURS", "STOCK", "NodeType", "Slot", "Widget", "WidgetValue"]


def _size(default: int) -> tuple[Widget, Widget]:
    return Widget("width", "INT", default), Widget("height", "INT", default)


_MODEL, _CLIP, _VAE = ("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")
_IMAGE, _LATENT = ("IMAGE", "IMAGE"), ("LATENT", "LATENT")
_CONTROL_NET = ("CONTROL_NET", "CONTROL_NET")
_BACKEND = Widget("backend", "COMBO", "auto")

STOCK = (
    NodeType(
        "CheckpointLoaderSimple",
        "Load Checkpoint",
        widgets=(Widget("ckpt_name", "COMBO", ""),),
        outputs=(_MODEL, _CLIP, _VAE),
    ),
    NodeType(
        "CLIPTextEncode",
        "CLIP Text Encode (Prompt)",
        inputs=(("clip", "CLIP"),),
        widgets=(Widget("text", "STRING", ""),),
        outputs=(("CONDITIONING", "CONDITIONING"),),
    ),
    NodeType(
        "EmptyLatentImage",
        "Empty Latent Image",
        widgets=(*_size(512), Widget("batch_size", "INT", 1)),
        outputs=(_LATENT,),
    ),
    NodeType(
        "KSampler",
        "KSampler",
        inputs=(
            ("model", "MODEL"),
            ("positive", "CONDITIONING"),
            ("negative", "CONDITIONING"),
            ("latent_image", "LATENT"),
        ),
        widgets=(
            Widget("seed", "INT", 0),
            Widget(AFTER_GENERATE, "COMBO", "fixed"),
            Widget("steps", "INT", 20),
            Widget("cfg", "FLOAT", 8.0),
            Widget("sampler_name", "COMBO", "euler"),
            Widget("scheduler", "COMBO", "normal"),
            Widget("denoise", "FLOAT", 1.0),
        ),
        outputs=(_LATENT,),
    ),
    NodeType(
        "VAEDecode",
        "VAE Decode",
        inputs=(("samples", "LATENT"), ("vae", "VAE")),
        outputs=(_IMAGE,),
    ),
    NodeType(
        "VAEEncode",
        "VAE Encode",
        inputs=(("pixels", "IMAGE"), ("vae", "VAE")),
        outputs=(_LATENT,),
    ),
    NodeType(
        "LoadImage",
        "Load Image",
        widgets=(
            Widget("image", "COMBO", "example.png"),
            Widget(UPLOAD, "IMAGEUPLOAD", "image"),
        ),
        outputs=(_IMAGE, ("MASK", "MASK")),
    ),
    NodeType(
        "ImageScale",
        "Upscale Image",
        inputs=(("image", "IMAGE"),),
        widgets=(
            Widget("upscale_method", "COMBO", "nearest-exact"),
            *_size(512),
            Widget("crop", "COMBO", "disabled"),
        ),
        outputs=(_IMAGE,),
    ),
    NodeType(
        "ImageStitch",
        "Stitch Images",
        inputs=(("image1", "IMAGE"), ("image2", "IMAGE")),
        widgets=(
            Widget("direction", "COMBO", "right"),
            Widget("match_image_size", "BOOLEAN", True),
            Widget("spacing_width", "INT", 0),
            Widget("spacing_color", "COMBO", "white"),
        ),
        outputs=(_IMAGE,),
    ),
    NodeType(
        "Canny",
        "Detect Edges (Canny)",
        inputs=(("image", "IMAGE"),),
        widgets=(Widget("low_threshold", "FLOAT", 0.4), Widget("high_threshold", "FLOAT", 0.8)),
        outputs=(_IMAGE,),
    ),
    NodeType(
        "ControlNetLoader",
        "Load ControlNet Model",
        widgets=(Widget("control_net_name", "COMBO", ""),),
        outputs=(_CONTROL_NET,),
    ),
    NodeType(
        "ControlNetApplyAdvanced",
        "Apply ControlNet",
        inputs=(
            ("positive", "CONDITIONING"),
            ("negative", "CONDITIONING"),
            ("control_net", "CONTROL_NET"),
            ("image", "IMAGE"),
        ),
        widgets=(
            Widget("strength", "FLOAT", 1.0),
            Widget("start_percent", "FLOAT", 0.0),
            Widget("end_percent", "FLOAT", 1.0),
        ),
        outputs=(("positive", "CONDITIONING"), ("negative", "CONDITIONING")),
        unused=1,  # vae
    ),
    NodeType(
        "LoraLoaderModelOnly",
        "Load LoRA",
        inputs=(("model", "MODEL"),),
        widgets=(Widget("lora_name", "COMBO", ""), Widget("strength_model", "FLOAT", 1.0)),
        outputs=(_MODEL,),
    ),
    NodeType(
        "ModelSamplingDiscrete",
        "ModelSamplingDiscrete",
        inputs=(("model", "MODEL"),),
        widgets=(Widget("sampling", "COMBO", "eps"), Widget("zsnr", "BOOLEAN", False)),
        outputs=(_MODEL,),
    ),
    NodeType(
        "SaveImage",
        "Save Image",
        inputs=(("images", "IMAGE"),),
        widgets=(Widget("filename_prefix", "STRING", "ComfyUI"),),
    ),
    NodeType("PreviewImage", "Preview Image", inputs=(("images", "IMAGE"),)),
    NodeType(
        "PrimitiveInt",
        "Int",
        widgets=(Widget("value", "INT", 0), Widget(AFTER_GENERATE, "COMBO", "fixed")),
        outputs=(("INT", "INT"),),
    ),
    NodeType("PreviewAny", "Preview as Text", inputs=(("source", "*"),), unused=4),  # preview_mode, and rows of text
    NodeType(NOTE, "Note", widgets=(Widget("text", "STRING", ""),)),
)
OURS = (
    NodeType(
        "ResoluteCompileModel",
        "Compile Model",
        inputs=(("model", "MODEL"),),
        widgets=(_BACKEND, Widget("batching", "COMBO", "auto"), Widget("leave_out", "STRING", "")),
        outputs=(_MODEL,),
    ),
    NodeType(
        "ResoluteCompileVAEDecode",
        "Compile VAE Decode",
        inputs=(("vae", "VAE"),),
        widgets=(_BACKEND,),
        outputs=(_VAE,),
    ),
    NodeType(
        "ResoluteCompileControlNet",
        "Compile ControlNet",
        inputs=(("control_net", "CONTROL_NET"),),
        widgets=(_BACKEND,),
        outputs=(_CONTROL_NET,),
    ),
    NodeType(
        "ResoluteDeepCache",
        "DeepCache",
        inputs=(("model", "MODEL"),),
        widgets=(
            Widget("interval", "INT", 3),
            Widget("depth", "INT", 2),
            Widget("start_percent", "FLOAT", 0.0),
            Widget("end_percent", "FLOAT", 1.0),
            Widget("schedule", "COMBO", "uniform"),
            Widget("power", "FLOAT", 1.4),
            Widget("centre", "INT", 15),
        ),
        outputs=(_MODEL,),
    ),
    NodeType(
        "ResoluteLoadCheckpoint",
        "Load Checkpoint (Compiled)",
        widgets=(
            Widget("ckpt_name", "COMBO", ""),
            _BACKEND,
            Widget("compile_vae", "BOOLEAN", True),
        ),
        outputs=(_MODEL, _CLIP, _VAE),
    ),
    NodeType(
        "ResoluteResolution",
        "Resolution",
        widgets=(
            Widget("preset", "COMBO", "custom"),
            *_size(1024),
            Widget("multiple", "COMBO", "8"),
            Widget("use", "COMBO", "exact"),
        ),
        outputs=(("width", "INT"), ("height", "INT")),
    ),
    NodeType(
        "ResoluteReport",
        "Graph Cache Report",
        inputs=(("any", "*"),),
        outputs=(("text", "STRING"), ("image", "IMAGE")),
    ),
    NodeType(
        "ResoluteCompareImages",
        "Compare Images",
        inputs=(("image_a", "IMAGE"), ("image_b", "IMAGE")),
        widgets=(Widget("max_error", "FLOAT", 255.0), Widget("min_psnr", "FLOAT", 0.0)),
        outputs=(
            ("text", "STRING"),
            ("heat_map", "IMAGE"),
            ("max_error", "FLOAT"),
            ("mean_error", "FLOAT"),
            ("psnr", "FLOAT"),
            ("ssim", "FLOAT"),
        ),
    ),
    NodeType("ResoluteFree", "Free Graphs", inputs=(("any", "*"),), outputs=(("any", "*"),)),
)
NODE_TYPES = {node_type.id: node_type for node_type in STOCK + FAMILY_NODES + OURS}
