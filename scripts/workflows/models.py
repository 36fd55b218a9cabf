"""The models that the bundled workflows name, and where ComfyUI offers to download them from.

The addresses are those of ComfyUI's own templates, but for two that no template has: ComfyUI's documentation links the
repository of the ControlNet, and the LoRA is its authors' own file.
"""

from __future__ import annotations

SD15 = "v1-5-pruned-emaonly-fp16.safetensors"
SDXL = "sd_xl_base_1.0.safetensors"
CONTROL_NET = "control_v11p_sd15_canny_fp16.safetensors"
LCM_LORA = "pytorch_lora_weights.safetensors"  # the name that its authors gave it

FLUX_DEV, CLIP_L, T5 = "flux1-dev.safetensors", "clip_l.safetensors", "t5xxl_fp16.safetensors"
Z_IMAGE_TURBO, QWEN_3, FLUX_VAE = "z_image_turbo_bf16.safetensors", "qwen_3_4b.safetensors", "ae.safetensors"
Z_IMAGE_TURBO_INT8, QWEN_3_FP8 = "z_image_turbo_int8_convrot.safetensors", "qwen_3_4b_fp8_mixed.safetensors"
QWEN_IMAGE, QWEN_IMAGE_VAE = "qwen_image_fp8_e4m3fn.safetensors", "qwen_image_vae.safetensors"
QWEN_25 = "qwen_2.5_vl_7b_fp8_scaled.safetensors"
WAN22, WAN22_VAE = "wan2.2_ti2v_5B_fp16.safetensors", "wan2.2_vae.safetensors"
UMT5 = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
LTX = "ltx-video-2b-v0.9.5.safetensors"

_HUGGING_FACE = "https://huggingface.co/"
# File name -> (repository on Hugging Face, folder in ComfyUI's models).
_MODELS = {
    SD15: ("Comfy-Org/stable-diffusion-v1-5-archive", "checkpoints"),
    SDXL: ("stabilityai/stable-diffusion-xl-base-1.0", "checkpoints"),
    CONTROL_NET: ("comfyanonymous/ControlNet-v1-1_fp16_safetensors", "controlnet"),
    LCM_LORA: ("latent-consistency/lcm-lora-sdxl", "loras"),
    FLUX_DEV: ("Comfy-Org/flux1-dev", "diffusion_models"),
    CLIP_L: ("comfyanonymous/flux_text_encoders", "text_encoders"),
    T5: ("comfyanonymous/flux_text_encoders", "text_encoders"),
    LTX: ("Lightricks/LTX-Video", "checkpoints"),
}
# The same for repositories that keep a model in a folder named like ComfyUI's.
_SPLIT = {
    Z_IMAGE_TURBO: ("Comfy-Org/z_image_turbo", "diffusion_models"),
    QWEN_3: ("Comfy-Org/z_image_turbo", "text_encoders"),
    FLUX_VAE: ("Comfy-Org/z_image_turbo", "vae"),
    Z_IMAGE_TURBO_INT8: ("Comfy-Org/z_image_turbo", "diffusion_models"),
    QWEN_3_FP8: ("Comfy-Org/z_image_turbo", "text_encoders"),
    QWEN_IMAGE: ("Comfy-Org/Qwen-Image_ComfyUI", "diffusion_models"),
    QWEN_25: ("Comfy-Org/Qwen-Image_ComfyUI", "text_encoders"),
    QWEN_IMAGE_VAE: ("Comfy-Org/Qwen-Image_ComfyUI", "vae"),
    WAN22: ("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "diffusion_models"),
    WAN22_VAE: ("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "vae"),
    UMT5: ("Comfy-Org/Wan_2.1_ComfyUI_repackaged", "text_encoders"),
}


def models_of(values: dict[str, object]) -> list[dict[str, str]]:
    """The list `properties.models` of a node with these widget values."""
    found = []
    for value in values.values():
        if isinstance(value, str) and value in {**_MODELS, **_SPLIT}:
            repository, folder = _MODELS.get(value) or _SPLIT[value]
            path = f"split_files/{folder}/{value}" if value in _SPLIT else value
            url = f"{_HUGGING_FACE}{repository}/resolve/main/{path}"
            found.append({"name": value, "url": url, "directory": folder})
    return found
