"""When Python looks for garbage among all objects."""

from __future__ import annotations

import gc

_YOUNG_ONES = 1000  # collections of younger objects before one of all; Python's default is 10


def leave_prompts_alone() -> None:
    """Have Python collect all objects a hundred times more rarely. ComfyUI does so after a prompt, at most every 10 s.

    Such a collection stops every thread, for half a second with the million objects that inductor's modules bring.
    Three came in 20 runs of SDXL, since a run lists all weights.
    """
    young, older, oldest = gc.get_threshold()
    gc.set_threshold(young, older, max(oldest, _YOUNG_ONES))
