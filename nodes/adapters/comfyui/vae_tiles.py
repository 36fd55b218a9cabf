"""Core's tiles: VAE Decode (Tiled), VAE Encode (Tiled), and what core does when memory runs out."""

from __future__ import annotations

import inspect
import sys

import comfy.utils

_DEEPEST = 30  # frames between a tile and the function of the VAE that it calls


def is_tile() -> bool:
    """The call of a VAE that runs now is for one of core's tiles.

    Nothing of the call itself says so: core passes each tile to the same method as a whole picture.
    """
    # Its decorator is torch's, whose code many functions share.
    tiled = inspect.unwrap(comfy.utils.tiled_scale_multidim).__code__
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame.f_code is tiled:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
