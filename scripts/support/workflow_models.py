"""The models that the bundled workflows name, and where ComfyUI offers to download them from."""

from __future__ import annotations

SD15 = "v1-5-pruned-emaonly-fp16.safetensors"
SDXL = "sd_xl_base_1.0.safetensors"
CONTROL_NET = "control_v11p_sd15_canny_fp16.safetensors"
LCM_LORA = "pytorch_lora_weights.safetensors"  # the name that its authors gave it

_HUGGING_FACE = "https://huggingface.co/"
# File name -> (repository on Hugging Face, folder in ComfyUI's models).
_MODELS = {
    SD15: ("Comfy-Org/stable-diffusion-v1-5-archive", "checkpoints"),
    SDXL: ("stabilityai/stable-diffusion-xl-base-1.0", "checkpoints"),
    CONTROL_NET: ("comfyanonymous/ControlNet-v1-1_fp16_safetensors", "controlnet"),
    LCM_LORA: ("latent-consistency/lcm-lora-sdxl", "loras"),
}


def models_of(values: dict[str, object]) -> list[dict[str, str]]:
    """What goes into `properties.models` of a node with these widget values."""
    found = []
    for value in values.values():
        if isinstance(value, str) and value in _MODELS:
            repository, folder = _MODELS[value]
            url = f"{_HUGGING_FACE}{repository}/resolve/main/{value}"
            found.append({"name": value, "url": url, "directory": folder})
    return found
