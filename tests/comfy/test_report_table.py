"""The text of Graph Cache Report."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch

from .in_process import PACK


def test_it_names_the_attention_kernel_of_each_shape_and_the_times(core: SimpleNamespace) -> None:
    attention = importlib.import_module(f"{PACK}.compile_cache.attention.chooser")
    stats = importlib.import_module(f"{PACK}.compile_cache.stats").Stats()
    seconds = iter([0.002, 0.001])
    kernels = dict.fromkeys(("flash", "math"), attention.torchs_choice)
    chooser = attention.Chooser(lambda run, device: next(seconds), lambda device: kernels)
    given = importlib.import_module(f"{PACK}.compile_cache.attention.kernels").Given
    chooser(given(torch.randn(2, 3, 9, 8), *torch.randn(2, 2, 3, 5, 8)))
    data = {"counters": stats.snapshot(), "bytes": 0, "budget_bytes": 0, "modules": [], "entries": []}
    data |= {"measurements": []}
    text = core.ours("report.table_and_chart").table({**data, "attention": chooser.report()})
    assert "attention of 2x3x9x8 with math: flash 2.00 ms, math 1.00 ms" in text
