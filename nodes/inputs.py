"""Inputs that several nodes share."""

from __future__ import annotations

import math
from typing import Any

from comfy_api.latest import io

from ..compile_cache.backends.registry import AUTO, CHOICES
from ..compile_cache.errors import UserError
from .adapters.patch import wrappers

CATEGORY = "Resolute"


def require_numbers(**values: float) -> None:
    """Raises UserError for NaN and infinity. ComfyUI's range check accepts NaN, since comparisons with it are False."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}, which is not a number. Type a number.")


def backend_input() -> Any:
    return io.Combo.Input(
        "backend",
        options=list(CHOICES),
        default=AUTO,
        tooltip=(
            "auto takes the fastest that runs here: inductor (compiled blocks, on NVIDIA with CUDA graphs), else "
            "cudagraph (NVIDIA only, nothing to compile), else eager (the original code). oneflow builds a graph for "
            "each size and needs Python 3.10: see docs/onediff.md."
        ),
    )


def batching_input() -> Any:
    return io.Combo.Input(
        "batching",
        options=list(wrappers.POLICIES),
        default=wrappers.AUTO,
        optional=True,
        tooltip=(
            "Positive and negative conditioning in one batch (always merge: faster) or one after the other (always "
            "split: less memory). auto lets ComfyUI decide by free memory in every step."
        ),
    )
