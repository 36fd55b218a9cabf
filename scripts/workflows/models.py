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
QWEN_IMAGE_EDIT = "qwen_image_edit_2509_fp8_e4m3fn.safetensors"
WAN22_HIGH = "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"
WAN22_LOW = "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors"
WAN21_VAE = "wan_2.1_vae.safetensors"
HUNYUAN15, HUNYUAN15_VAE = "hunyuanvideo1.5_720p_t2v_fp16.safetensors", "hunyuanvideo15_vae_fp16.safetensors"
BYT5 = "byt5_small_glyphxl_fp16.safetensors"
LTX2, GEMMA_3 = "ltx-2-19b-dev-fp8.safetensors", "gemma_3_12B_it_fp4_mixed.safetensors"
LTX2_DISTILLED = "ltx-2-19b-distilled-lora-384.safetensors"
LTX2_UPSCALER = "ltx-2-spatial-upscaler-x2-1.0.safetensors"
H3, H3_TEXT = "minimax_h3_fl2va_pruned_int8_convrot.safetensors", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors"
H3_VAE, H3_SOUND = "minimax_h3_video_vae_fp16.safetensors", "minimax_h3_audio_vae_fp32.safetensors"

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
    LTX2: ("Lightricks/LTX-2", "checkpoints"),
    LTX2_DISTILLED: ("Lightricks/LTX-2", "loras"),
    LTX2_UPSCALER: ("Lightricks/LTX-2", "latent_upscale_models"),
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
    WAN22_HIGH: ("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "diffusion_models"),
    WAN22_LOW: ("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "diffusion_models"),
    WAN21_VAE: ("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "vae"),
    QWEN_IMAGE_EDIT: ("Comfy-Org/Qwen-Image-Edit_ComfyUI", "diffusion_models"),
    HUNYUAN15: ("Comfy-Org/HunyuanVideo_1.5_repackaged", "diffusion_models"),
    HUNYUAN15_VAE: ("Comfy-Org/HunyuanVideo_1.5_repackaged", "vae"),
    BYT5: ("Comfy-Org/HunyuanVideo_1.5_repackaged", "text_encoders"),
    GEMMA_3: ("Comfy-Org/ltx-2", "text_encoders"),
    UMT5: ("Comfy-Org/Wan_2.1_ComfyUI_repackaged", "text_encoders"),
}

# The same for a repository without a folder split_files.
_IN_FOLDERS = {
    H3: ("Comfy-Org/MiniMax-H3", "diffusion_models"),
    H3_TEXT: ("Comfy-Org/MiniMax-H3", "text_encoders"),
    H3_VAE: ("Comfy-Org/MiniMax-H3", "vae"),
    H3_SOUND: ("Comfy-Org/MiniMax-H3", "vae"),
}
_KNOWN = {**_MODELS, **_SPLIT, **_IN_FOLDERS}


def models_of(values: dict[str, object]) -> list[dict[str, str]]:
    """The list `properties.models` of a node with these widget values."""
    found = []
    for value in values.values():
        if isinstance(value, str) and value in _KNOWN:
            repository, folder = _KNOWN[value]
            path = value if value in _MODELS else f"{folder}/{value}"
            path = f"split_files/{path}" if value in _SPLIT else path
            url = f"{_HUGGING_FACE}{repository}/resolve/main/{path}"
            found.append({"name": value, "url": url, "directory": folder})
    return found
