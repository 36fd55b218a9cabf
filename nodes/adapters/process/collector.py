"""How often Python's garbage collector runs a full collection."""

from __future__ import annotations

import gc

_YOUNG_ONES = 1000  # collections of younger objects before one of all; Python's default is 10


def make_full_collections_rare() -> None:
    """Make full collections a hundred times rarer. ComfyUI runs one after a prompt, at most every 10 s.

    A full collection stops every thread, for half a second with the million objects of inductor's modules. 20 runs of
    SDXL triggered three, since each run lists all weights.
    """
    young, older, oldest = gc.get_threshold()
    gc.set_threshold(young, older, max(oldest, _YOUNG_ONES))
