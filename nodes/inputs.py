"""Inputs that several nodes share."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache.backends.registry import AUTO, CHOICES

CATEGORY = "Resolute"


def backend_input() -> Any:
    return io.Combo.Input(
        "backend",
        options=list(CHOICES),
        default=AUTO,
        tooltip=(
            "auto: the fastest that runs here. inductor: compiled blocks, and CUDA graphs on NVIDIA. "
            "cudagraph: CUDA graphs of the original code, nothing to compile (NVIDIA only). "
            "eager: the original, for comparison."
        ),
    )
