"""The tiles of a VAE: which of their sizes are worth a capture."""

from __future__ import annotations

from typing import Any

from ..comfyui import vae_tiles
from .call_description import CallDescription

_MOST = 1024  # sizes that are remembered
_AGAIN = "a tile of this size came again"


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
        if not vae_tiles.is_tile():
            return
        size = description.quick_key()
        if size in self._met:
            description.why_captured = _AGAIN
            return
        if len(self._met) >= _MOST:
            self._met.clear()
        self._met.add(size)
        description.policy = description.policy.uncaptured()
