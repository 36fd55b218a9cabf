"""ComfyUI's bar on the node that runs, for one long call: a decode or an encode of a video can take minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import comfy.utils

_LONG = 1.0  # seconds; a shorter call shows no bar


class CallBar:
    """Counts the blocks of a call. How many there will be is known from an earlier call of the same module.

    The GPU is at most some hundred launches behind what is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._blocks: dict[tuple[int, ...], int] = {}  # by shape: the fewest, since a first call runs blocks twice
        self._shape: tuple[int, ...] = ()
        self._done = self._total = 0
        self._begun = 0.0
        self._bar: comfy.utils.ProgressBar | None = None

    def begin(self, shape: Sequence[int]) -> None:
        """A call starts. shape: of its first tensor, frames third if it has five dimensions."""
        self._shape, self._done, self._begun = tuple(shape), 0, self._clock()
        self._total = self._blocks.get(self._shape) or self._expected()

    def advance(self) -> None:
        """A block is about to run. ComfyUI may raise its interruption here."""
        self._done += 1
        if not self._total or (self._bar is None and self._clock() - self._begun < _LONG):
            return
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(self._total)
        self._bar.update_absolute(min(self._done, self._total))

    def end(self, is_whole: bool) -> None:
        """The call ended. is_whole: it was answered."""
        if is_whole and self._done:
            self._blocks[self._shape] = min(self._done, self._blocks.get(self._shape, self._done))
        self._shape, self._total, self._bar = (), 0, None

    def _expected(self) -> int:
        """As many blocks for a frame as in the longest call so far; 0 if there was none."""
        shape, blocks = max(self._blocks.items(), key=lambda known: _frames(known[0]), default=((), 0))
        return round(blocks * _frames(self._shape) / _frames(shape)) if blocks else 0


def _frames(shape: Sequence[int]) -> int:
    return shape[2] if len(shape) == 5 else 1
