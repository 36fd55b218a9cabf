"""The text of Graph Cache Report."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace

import pytest
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
    data |= {"measurements": [], "whole_calls": []}
    text = core.ours("report.table_and_chart").table({**data, "attention": chooser.report()})
    assert "attention of 2x3x9x8 with math: flash 2.00 ms, math 1.00 ms" in text


def test_a_decode_that_is_left_alone_has_both_times_in_the_table(core: SimpleNamespace) -> None:
    stats = importlib.import_module(f"{PACK}.compile_cache.stats").Stats()
    data = {"counters": stats.snapshot(), "bytes": 0, "budget_bytes": 0, "modules": [], "entries": []}
    found = {"role": "vae_decode", "shape": [1, 16, 21, 60, 104], "seconds": 1.3, "original_seconds": 1.1}
    data |= {"measurements": [], "attention": []}
    states = [(True, True), (True, False), (False, False)]
    calls = [{**found, "is_settled": settled, "is_left_alone": alone} for settled, alone in states]
    text = core.ours("report.table_and_chart").table({**data, "whole_calls": calls})
    told = [line for line in text.splitlines() if "1x16x21x60x104" in line]
    assert told == [
        "decoding 1x16x21x60x104 is left alone: 1.3 s compiled, 1.1 s as it is on this device",
        "decoding 1x16x21x60x104 runs compiled: 1.3 s, 1.1 s as it is on this device",
    ]


def test_the_button_free_compares_decodes_again_and_the_node_does_not(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, compared = core.ours("sampling.memory"), list[str]()
    monkeypatch.setattr(memory, "broadcast", lambda *given, **more: None)
    whole_calls = core.ours("process.runtime").cache().whole_calls
    monkeypatch.setattr(whole_calls, "measure_again", lambda: compared.append("again"))
    memory.free_graphs()  # as the node does, in each prompt
    assert compared == []
    idle = SimpleNamespace(mutex=contextlib.nullcontext(), currently_running={})
    assert memory.free_or_wait(idle)["state"] == "nothing"
    assert compared == ["again"]
