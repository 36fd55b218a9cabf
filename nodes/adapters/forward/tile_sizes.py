"""The tiles of a VAE: VAE Decode (Tiled), VAE Encode (Tiled), and what core does when memory runs out."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import comfy.utils

from .call_description import CallDescription

_MOST = 1024  # sizes that are remembered
_AGAIN = "a tile of this size came again"
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


class TileSizes:
    """The sizes of tiles that one module met.

    A picture in tiles has up to twelve sizes, in three passes. Those at an edge come once in a picture, and another
    picture has others. A capture takes longer than the call that it replaces, so a size is captured when it comes
    again.
    """

    def __init__(self) -> None:
        self._met: set[tuple[Any, ...]] = set()

    def describe(self, description: CallDescription) -> None:
        """Note the size of a call, and forbid its capture, if it is a tile that comes for the first time."""
        if not is_tile():
            return
        size = description.quick_key()
        if size in self._met:
            description.why_captured = _AGAIN
            return
        if len(self._met) >= _MOST:
            self._met.clear()
        self._met.add(size)
        description.policy = description.policy.uncaptured()
