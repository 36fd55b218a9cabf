"""The one place that decides if the blocks of a model are split (`split_blocks`) and its pages ordered for that."""

from __future__ import annotations

GAINS = False  # True once `benchmarks.run streamed` shows a gain; name its raw file here


def splits_blocks(wish: bool | None, streams: bool) -> bool:
    """Only while the model's weights stream, and then as the user wishes. wish: None if he leaves it to `GAINS`."""
    return streams and (GAINS if wish is None else wish)
