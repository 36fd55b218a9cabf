"""The encoder of AutoencoderKL: residual blocks, attention, downsampling and the last normalisation."""

from __future__ import annotations

from typing import Any

import torch

from ....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ..comfyui import version
from ..foreign.core_code import is_core, is_core_class
from .decoder import feature_block

_MODEL = "comfy.ldm.modules.diffusionmodules.model"


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of an image encoder; empty for other encoders.

    A residual block of a width that the decoder has too shares the decoder's region.
    """
    if not is_encoder(module):
        return []
    kinds = ["ResnetBlock", "Downsample", *(["AttnBlock"] if version.vae_attention_is_traceable() else [])]
    found = [
        feature_block(name, kind, block, run)
        for name, block in module.named_modules()
        for kind in kinds
        if is_core(block, _MODEL, kind)
    ]
    return [*found, feature_block("norm_out", "GroupNorm", module.norm_out, run)]


def is_encoder(module: Any) -> bool:
    """A module is core's image encoder, and not a subclass."""
    return is_core_class(type(module), _MODEL, "Encoder")
