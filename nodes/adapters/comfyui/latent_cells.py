"""Pixels along a side of a latent cell, as a loaded model or VAE declares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# For most models; ComfyUI 0.8.0 declares no other number.
DEFAULT = 8
# Channels and rows of ACE-Step's latents: sound, but with four dimensions like a picture.
_SOUND = (8, 16)


def is_picture(latent: Sequence[int]) -> bool:
    """A latent of this shape is a picture's: (batch, channels, height, width), no video and no sound."""
    return len(latent) == 4 and tuple(latent[1:3]) != _SOUND


def of_format(latent_format: Any) -> int:
    """Pixels per latent cell of a model's `latent_format`; the default for None."""
    return int(getattr(latent_format, "spacial_downscale_ratio", DEFAULT))


def of_vae(vae: Any) -> int:
    """Pixels per latent cell of a comfy.sd.VAE. A video VAE has a tuple, with the width last; some have a function."""
    ratio = vae.upscale_ratio
    ratio = ratio[-1] if isinstance(ratio, tuple) else ratio
    return ratio if isinstance(ratio, int) else DEFAULT
