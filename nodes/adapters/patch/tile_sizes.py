"""The tiles of a VAE: of VAE Decode (Tiled), of VAE Encode (Tiled), and of core's retry when memory runs out."""

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
    """True if the VAE's current call is for one of core's tiles.

    It searches the call stack, because core passes each tile to the same method as a whole picture.
    """
    # Unwrapped, because its decorator is torch's, and many functions share the decorator's code object.
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
    """The sizes of tiles that one module has run.

    A picture in tiles has up to twelve sizes, in three passes. A size at an edge occurs once in a picture, and differs
    between pictures. A capture takes longer than the call that it replaces, so a size is captured only at its
    second call.
    """

    def __init__(self) -> None:
        self._met: set[tuple[Any, ...]] = set()

    def describe(self, description: CallDescription) -> None:
        """Note the size of a tile's call, and forbid the capture of the first call of each size."""
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
