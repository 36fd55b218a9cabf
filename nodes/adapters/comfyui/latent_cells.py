"""How many pixels a side of a latent cell has, as a loaded model or VAE says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of most models; 0.8.0 knows no other number.
DEFAULT = 8
# Channels and rows of ACE-Step's latents: sound with the four dimensions of a picture.
_SOUND = (8, 16)


def is_picture(latent: Sequence[int]) -> bool:
    """A latent of this shape is a picture's: (batch, channels, height, width), no video and no sound."""
    return len(latent) == 4 and tuple(latent[1:3]) != _SOUND


def of_format(latent_format: Any) -> int:
    """Of a model's `latent_format`; None has the default."""
    return int(getattr(latent_format, "spacial_downscale_ratio", DEFAULT))


def of_vae(vae: Any) -> int:
    """Of a comfy.sd.VAE. Those of videos have a tuple, whose last entry is the width's; some have a function."""
    ratio = vae.upscale_ratio
    ratio = ratio[-1] if isinstance(ratio, tuple) else ratio
    return ratio if isinstance(ratio, int) else DEFAULT
