"""A product in fp8 for the CPU, which PyTorch has for CUDA alone: so the way that such weights take runs here too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: Any,
    swizzle_a: Any,
    scale_b: list[torch.Tensor],
    recipe_b: Any,
    swizzle_b: Any,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *more: Any,
) -> torch.Tensor:
    result = (a.float() @ b.float()) * (scale_a[0] * scale_b[0])
    return (result if bias is None else result + bias.float()).to(out_dtype or a.dtype)


@pytest.fixture
def fp8_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ComfyUI finds that the device has products in fp8, and PyTorch computes them."""
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(management, "supports_fp8_compute", lambda device=None: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm_v2", _product, "CPU")
    try:
        yield
    finally:
        library._destroy()
