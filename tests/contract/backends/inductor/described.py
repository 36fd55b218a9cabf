"""Tests that compile for a GPU from its description."""

from __future__ import annotations

import pytest

from compile_cache.torch_compat.private_names import Feature, why_unavailable

# Before 2.10 torch asks the driver for each tensor of a GPU that it traces.
needs_descriptions = pytest.mark.skipif(
    bool(why_unavailable(Feature.GPU_WORKERS)), reason=why_unavailable(Feature.GPU_WORKERS)
)
