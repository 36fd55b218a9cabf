"""Inputs that several nodes share."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache.backends.registry import AUTO, CHOICES
from .adapters.sampling import cond_batching

CATEGORY = "Resolute"


def backend_input() -> Any:
    return io.Combo.Input(
        "backend",
        options=list(CHOICES),
        default=AUTO,
        tooltip=(
            "auto: the fastest that runs here. inductor: compiled blocks, and CUDA graphs on NVIDIA. "
            "cudagraph: CUDA graphs of the original code, nothing to compile (NVIDIA only). "
            "oneflow: OneFlow graphs, one per size (Python 3.10; see the README). "
            "eager: the original, for comparison."
        ),
    )


def batching_input() -> Any:
    return io.Combo.Input(
        "batching",
        options=list(cond_batching.POLICIES),
        default=cond_batching.AUTO,
        optional=True,
        tooltip=(
            "Positive and negative prompt in one batch, or one after the other. auto: ComfyUI's choice by free memory. "
            "always merge: one batch, the faster way where memory allows. always split: one after the other, for less "
            "memory."
        ),
    )
