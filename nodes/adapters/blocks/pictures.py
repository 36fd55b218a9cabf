"""The decoder and the encoder of AutoencoderKL: residual blocks, attention, resampling and the last normalisation."""

from __future__ import annotations

from typing import Any

import torch

from ....compile_cache.modules.site import Bypass, Hook, RegionRunner, RegionSite
from ..comfyui import version
from ..trust.core_code import is_core, is_core_class
from .common import FEATURES, original

_MODEL = "comfy.ldm.modules.diffusionmodules.model"


def hooks(module: Any, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the blocks of an image decoder or encoder.

    Decoder and encoder share the region of residual blocks of equal width.
    """
    kinds = ["ResnetBlock", "Upsample", "Downsample", *(["AttnBlock"] if version.vae_attention_is_traceable() else [])]
    found = [
        feature_block(name, kind, block, run)
        for name, block in module.named_modules()
        for kind in kinds
        if is_core(block, _MODEL, kind)
    ]
    return [*found, feature_block("norm_out", "GroupNorm", module.norm_out, run)]


def is_decoder(module: Any) -> bool:
    """The module is core's image decoder, not a subclass, and does not convolve over frames."""
    return is_core_class(type(module), _MODEL, "Decoder") and isinstance(module.conv_in, torch.nn.Conv2d)


def is_encoder(module: Any) -> bool:
    """The module is core's image encoder, and not a subclass."""
    return is_core_class(type(module), _MODEL, "Encoder")


def feature_block(name: str, kind: str, block: Any, run: RegionRunner) -> Hook:
    """A hook for a block of an image decoder or encoder that maps one feature map to another."""
    site = RegionSite(name, kind, block, original, (FEATURES,), attends=kind == "AttnBlock")

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The region takes only a feature map: no time embedding, and no frames that a video decoder carries over.
        plain = all(value is None for value in (*args, *kwargs.values()))
        if x.ndim != 4 or not plain:
            return original(block, x, *args, **kwargs)
        return run(site, x)

    return Hook(block, forward, (site,))
