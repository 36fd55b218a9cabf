"""The demo's UNet, text encoder and VAE: ComfyUI's own classes with few channels, and their loaders.

Needs ComfyUI's modules to be importable.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import comfy.supported_models_base
import comfy.utils
import torch

from . import captions

FOLDER = Path(__file__).resolve().parent
UNET_FILE, VAE_FILE = "demo_unet.safetensors", "demo_vae.safetensors"
CONTEXT = 64
# Three levels like SDXL: the first level has no transformers and one block more than the others.
UNET: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [2, 1, 1],
    "channel_mult": [1, 2, 2], "transformer_depth": [0, 0, 1, 0], "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 0, 1, 0, 1, 0], "use_spatial_transformer": True,
    "use_linear_in_transformer": True, "use_checkpoint": False, "legacy": False, "context_dim": CONTEXT,
    "num_heads": -1, "num_head_channels": 32, "adm_in_channels": None,
}  # fmt: skip
VAE: dict[str, Any] = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
_UNET, _TEXT = "unet.", "text."


class CaptionEncoder(torch.nn.Module):
    """Word numbers (batch, phrases, 4) -> conditioning (batch, phrases * 4, CONTEXT).

    A token is its word's own vector plus the sum of the shared vectors of all words in its phrase, so that it encodes
    which colour belongs to which shape. Repeating a phrase changes nothing; ComfyUI repeats conditioning to pad it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Embedding(len(captions.WORDS), CONTEXT)
        self.shared = torch.nn.Embedding(len(captions.WORDS), CONTEXT)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.own(numbers) + self.shared(numbers).sum(-2, keepdim=True)
        return tokens.flatten(1, 2)


class CaptionCLIP:
    """The part of ComfyUI's CLIP interface that CLIP Text Encode uses."""

    def __init__(self, encoder: CaptionEncoder) -> None:
        self._encoder = encoder

    def tokenize(self, text: str) -> list[captions.Phrase]:
        """The caption's word numbers. Raises ValueError for an unknown word."""
        return captions.numbers(text)

    def encode_from_tokens_scheduled(self, tokens: list[captions.Phrase]) -> list[Any]:
        """CONDITIONING with one entry, (1, phrases * 4, CONTEXT) in float32."""
        return [[self._encoder(torch.tensor([tokens])).detach(), {}]]


def load_model(path: str = str(FOLDER / UNET_FILE), disable_dynamic: bool = False) -> Any:
    """A ModelPatcher of UNET_FILE. ComfyUI's loaders detect only UNets with 320 channels, so build it directly."""
    config = comfy.supported_models_base.BASE(UNET)
    # BASE has set heads of 64 channels; restore ours.
    config.unet_config.update(num_heads=UNET["num_heads"], num_head_channels=UNET["num_head_channels"])
    config.latent_format = comfy.supported_models.SD15.latent_format()
    config.memory_usage_factor = comfy.supported_models.SD15.memory_usage_factor
    device = comfy.model_management.get_torch_device()
    dtype = comfy.model_management.unet_dtype(device=device, supported_dtypes=config.supported_inference_dtypes)
    config.set_inference_dtype(dtype, None)
    offload = comfy.model_management.unet_offload_device()
    model = comfy.model_base.BaseModel(config, device=offload)
    # ComfyUI 0.8.0 has one patcher class; later versions have another on NVIDIA, which pages weights.
    kind = comfy.model_patcher.ModelPatcher
    if not disable_dynamic:
        kind = getattr(comfy.model_patcher, "CoreModelPatcher", kind)
    patcher = kind(model, load_device=device, offload_device=offload)
    options = {}
    if "assign" in inspect.signature(model.load_model_weights).parameters:
        options["assign"] = patcher.is_dynamic()
    weights = {name: weight.to(dtype) for name, weight in _part(path, _UNET).items()}
    model.load_model_weights(weights, "", **options)
    # Core calls this to make another copy of the model; its own loaders set it too.
    patcher.cached_patcher_init = (load_model, (path,))
    return patcher


def load_clip(path: str = str(FOLDER / UNET_FILE)) -> CaptionCLIP:
    """The text encoder of UNET_FILE, on the CPU; it is only an embedding table."""
    encoder = CaptionEncoder()
    encoder.load_state_dict({name: weight.float() for name, weight in _part(path, _TEXT).items()})
    return CaptionCLIP(encoder)


def load_vae(path: str = str(FOLDER / VAE_FILE)) -> Any:
    """A comfy.sd.VAE of VAE_FILE: an AutoencoderKL of 8x and 4 channels."""
    config = {"params": {"ddconfig": dict(VAE), "embed_dim": VAE["z_channels"]}}
    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(path), config=config)


def _part(path: str, prefix: str) -> dict[str, torch.Tensor]:
    whole = comfy.utils.load_torch_file(path)
    return {name.removeprefix(prefix): weight for name, weight in whole.items() if name.startswith(prefix)}
