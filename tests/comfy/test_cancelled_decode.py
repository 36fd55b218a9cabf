"""A decode or an encode that is cancelled between two blocks: it ends there, and leaves nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import vaes
from .families.kit import run_traces
from .vaes import Compiled, pixels

pytestmark = pytest.mark.usefixtures("inference")

CALLS: dict[str, Callable[[Any], torch.Tensor]] = {
    "decode": lambda vae: vae.decode(torch.full((1, 4, 9, 11), 0.5)),
    "encode": lambda vae: vae.encode(pixels(72, 88)),
    "decode in tiles": lambda vae: vae.decode_tiled(torch.full((1, 4, 11, 9), 0.5), 8, 8, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_ends_at_the_next_block_and_leaves_nothing(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    run_traces(core, monkeypatch)
    compiled, call = Compiled(core, vaes.tiny()), CALLS[name]
    compiled.check(call)
    management, progress = core.comfy.model_management, core.ours("comfyui.compile_progress").CompileProgress
    blocks, begin = list[str](), progress.begin_block

    def cancel_at_the_third(self: Any) -> None:
        blocks.append("begun")
        if len(blocks) == 3:
            management.interrupt_current_processing()
        begin(self)

    monkeypatch.setattr(progress, "begin_block", cancel_at_the_third)
    with pytest.raises(management.InterruptProcessingException):
        call(compiled.ours)
    assert len(blocks) == 3
    monkeypatch.undo()
    run_traces(core, monkeypatch)
    modules = [*compiled.ours.first_stage_model.encoder.modules(), *compiled.ours.first_stage_model.decoder.modules()]
    ours = {id(compiled.ours.first_stage_model.encoder), id(compiled.ours.first_stage_model.decoder)}
    assert [module for module in modules if "forward" in vars(module) and id(module) not in ours] == []
    latest = core.ours("report.runs").latest()[-1]
    assert latest["stopped"]
    rise = compiled.check(call)
    assert rise.region_compiles == 0
    assert rise.eager_calls == 0


class Bar:
    """ComfyUI's bar, which keeps each update."""

    made: list[Bar] = []

    def __init__(self, total: int) -> None:
        self.total, self.values = total, list[int]()
        self.made.append(self)

    def update_absolute(self, value: int) -> None:
        self.values.append(value)


def test_a_long_call_shows_its_blocks_from_the_second_one_on(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, now = core.ours("comfyui.call_bar"), [0.0]
    monkeypatch.setattr(importlib.import_module("comfy.utils"), "ProgressBar", Bar)
    Bar.made.clear()
    bar = module.CallBar(lambda: now[0])

    def run(frames: int, blocks: int, seconds: float) -> None:
        bar.begin((1, 16, frames, 8, 8))
        for _ in range(blocks):
            now[0] += seconds
            bar.advance()
        bar.end(is_whole=True)

    run(4, 40, 1.0)
    assert Bar.made == []  # it is not known how many there will be
    run(8, 80, 0.5)
    assert [made.total for made in Bar.made] == [80]
    assert Bar.made[0].values == list(range(2, 81))
    run(8, 80, 0.001)
    assert len(Bar.made) == 1  # it took less than a second
