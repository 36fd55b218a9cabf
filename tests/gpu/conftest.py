"""Tests that need an NVIDIA GPU; `scripts/test --gpu` runs them, and they skip with that reason elsewhere."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
