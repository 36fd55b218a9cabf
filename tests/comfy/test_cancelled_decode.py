"""A decode or an encode that is cancelled between two blocks: it ends there, and leaves nothing."""

from __future__ import annotations

import gc
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

CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "decode": (vaes.tiny, lambda vae: vae.decode(torch.full((1, 4, 9, 11), 0.5))),
    "encode": (vaes.tiny, lambda vae: vae.encode(pixels(72, 88))),
    "decode in tiles": (vaes.tiny, lambda vae: vae.decode_tiled(torch.full((1, 4, 11, 9), 0.5), 8, 8, 2)),
    "decode of a video": (vaes.wan, lambda vae: vae.decode(torch.full((1, 16, 3, 5, 7), 0.5))),
    "encode of a video": (vaes.wan, lambda vae: vae.encode(pixels(40, 56, 9))),
}


def maps() -> int:
    """How many maps of pictures and videos there are in memory, but for weights."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.ndim in (4, 5) for each in found)


@pytest.mark.parametrize("name", CALLS)
def test_it_ends_at_the_next_block_and_leaves_nothing(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_traces(core, monkeypatch)
    make, call = CALLS[name]
    compiled = Compiled(core, make())
    compiled.check(call)
    left = maps()
    last = 3 if make is vaes.tiny else 30  # of a video in its second part: blocks carry frames
    management, progress = core.comfy.model_management, core.ours("comfyui.compile_progress").CompileProgress
    blocks, begin = list[str](), progress.begin_block

    def cancel_at_the_last(self: Any) -> None:
        blocks.append("begun")
        if len(blocks) == last:
            management.interrupt_current_processing()
        begin(self)

    monkeypatch.setattr(progress, "begin_block", cancel_at_the_last)
    with pytest.raises(management.InterruptProcessingException):
        call(compiled.ours)
    assert len(blocks) == last
    assert maps() == left
    monkeypatch.undo()
    run_traces(core, monkeypatch)
    modules = [*compiled.ours.first_stage_model.encoder.modules(), *compiled.ours.first_stage_model.decoder.modules()]
    ours = {id(compiled.ours.first_stage_model.encoder), id(compiled.ours.first_stage_model.decoder)}  # the methods
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
    module, now = core.ours("comfyui.compile_progress"), [0.0]
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
