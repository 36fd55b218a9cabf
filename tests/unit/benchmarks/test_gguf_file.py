"""The GGUF files of benchmarks: blocks that decode to the weights, and what is said where something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gguf_file import QUANTIZERS, require
from compile_cache.regions.gguf_types import FORMATS, decoded
from scripts.errors import SetupError


@pytest.mark.parametrize(("form", "most"), [("Q8_0", 0.01), ("Q4_K", 0.09)])
def test_blocks_decode_to_the_weights_that_they_were_made_of(form: str, most: float) -> None:
    weight = 0.02 * torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    weight[1] = weight[1].abs()  # no negative number: the least one is above 0
    numbers, quantize = QUANTIZERS[form]
    blocks = quantize(weight)
    assert blocks.dtype is torch.uint8
    assert blocks.shape == (weight.numel() // numbers, FORMATS[form].bytes)
    found = decoded(form, blocks, weight.shape)
    for row, exact in zip(found, weight, strict=True):
        assert float((row - exact).norm()) <= most * float(exact.norm())


def test_a_row_in_gguf_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--gguf-pack FOLDER"):
        require(Path(sys.executable), None, None)
    with pytest.raises(SetupError, match="is none"):
        require(Path(sys.executable), tmp_path, None)
    for name in ("__init__.py", "ops.py", "loader.py"):
        (tmp_path / name).touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "gguf.py").write_text("raise ImportError\n", "utf-8")
    with pytest.raises(SetupError, match="--packages FOLDER"):
        require(Path(sys.executable), tmp_path, tmp_path / "broken")
    (tmp_path / "gguf.py").touch()
    require(Path(sys.executable), tmp_path, tmp_path)
