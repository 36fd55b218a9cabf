"""All operators of ours that a trace, or code that was compiled of one, may call."""

from __future__ import annotations

from ....attention import chooser, chosen
from ....regions import own_memory
from . import casts, gelu, kitchen


def register() -> None:
    """Define them in this process. Do it before a trace or compiled code is loaded that another process made."""
    chooser.operator()
    chosen.operator()
    own_memory.operator()
    kitchen.operators()
    casts.operator()
    gelu.operator()
