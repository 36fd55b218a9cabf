"""After a restart the first call captures the shapes of the earlier process; here, with captures that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

SIDES = (8, 16, 24)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def _forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, control: Any = None, transformer_options: Any = None
    ) -> torch.Tensor:
        extra = control["output"][0] if control else 0
        return x * self.scale + extra


@dataclass
class Process:
    """A process of its own on one store: nothing in memory, a module that was just loaded."""

    adapter: Callable[[str], ModuleType]
    folder: Path
    remember: bool = True
    cancelled: bool = False
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        service = self.adapter("process.runtime")
        config = service.CacheConfig(store_folder=self.folder, remember=self.remember)
        self.cache = service._cache = service.GraphCache(config)
        process = self

        class Pretending(service.Program):  # type: ignore[misc]
            def run(self, call: Any) -> Any:
                return call.invoke(call.tensors)

            def capture(self, call: Any, result: Any) -> Any:
                process.captured.append(tuple(call.tensors[0].shape[2:]))
                return SimpleNamespace(bytes=1000, replay=call.invoke, close=lambda: None)

        self.captured: list[tuple[int, ...]] = []
        can = service.registry.Capabilities(available=True, compiles=True, captures=True)
        program = Pretending(service.record_of(self.model).owner, can)
        forward = self.adapter("forward.compiled_forward")
        self.forward = forward.CompiledForward(self.model, self.model._forward, "inductor", forward.Role.UNET, [], None)
        self.forward.runner._programs["cpu"] = (program, "inductor")

    def __call__(self, side: int = 8, control: Any = None, **options: Any) -> torch.Tensor:
        x = torch.ones(1, 4, side, side)
        result: torch.Tensor = self.forward(x, torch.ones(1), control=control, transformer_options=options)
        return result


@pytest.fixture
def start(
    adapter: Callable[[str], ModuleType], comfy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Process]:
    monkeypatch.setattr(adapter("process.runtime"), "_cache", None)
    return lambda **options: Process(adapter, tmp_path / "store", **options)


@pytest.fixture
def earlier(start: Callable[..., Process]) -> None:
    """What a process did that is gone."""
    process = start()
    with torch.inference_mode():
        for side in SIDES:
            process(side)
    assert process.captured == [(side, side) for side in SIDES]


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.usefixtures("earlier")
class TestTheNextProcess:
    def test_the_first_call_captures_all_of_them_the_latest_used_first(self, start: Callable[..., Process]) -> None:
        process = start()
        assert torch.equal(process(16), torch.full((1, 4, 16, 16), 2.0))
        assert process.captured == [(16, 16), (24, 24), (8, 8)]
        for side in SIDES:
            process(side)
        assert len(process.captured) == len(SIDES)
        assert process.cache.stats.counters.replays == len(SIDES)

    def test_a_shape_that_is_new_is_captured_before_them(self, start: Callable[..., Process]) -> None:
        process = start()
        process(40)
        assert process.captured == [(40, 40), (24, 24), (16, 16), (8, 8)]

    def test_it_can_be_turned_off(self, start: Callable[..., Process]) -> None:
        process = start(remember=False)
        process(16)
        assert process.captured == [(16, 16)]

    def test_a_call_with_other_inputs_does_not_show_how(self, start: Callable[..., Process]) -> None:
        process = start()
        process(16, control={"output": [torch.ones(1)]})
        assert process.captured == [(16, 16)]
        process(16)
        assert process.captured[1:] == [(16, 16), (24, 24), (8, 8)]

    def test_a_call_that_may_not_be_captured_does_not_either(self, start: Callable[..., Process]) -> None:
        process = start()
        process(16, patches={"attn1_patch": [print]})
        assert process.captured == []

    def test_cancel_stops_between_two(self, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
        process = start()
        presses = iter([None, None, InterruptedError("cancelled")])

        def checkpoint() -> None:
            press = next(presses, None)
            if press is not None:
                raise press

        monkeypatch.setattr(process.forward.runner.progress, "raise_if_cancelled", checkpoint)
        with pytest.raises(InterruptedError):
            process(16)
        assert (16, 16) in process.captured
        assert len(process.captured) < len(SIDES)
        monkeypatch.undo()

    def test_no_more_time_than_its_budget(
        self, start: Callable[..., Process], adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(adapter("restart.recapture"), "_MAX_SECONDS", -1.0)
        process = start()
        process(16)
        assert process.captured == [(16, 16)]

    def test_one_that_fails_ends_it_and_the_picture_is_right(self, start: Callable[..., Process]) -> None:
        process = start()
        own = process.forward.runner._programs["cpu"][0]
        run = own.run

        def limited(call: Any) -> Any:
            if call.tensors[0].shape[-1] > 16:
                raise torch.cuda.OutOfMemoryError("too large")
            return run(call)

        own.run = limited
        assert torch.equal(process(16), torch.full((1, 4, 16, 16), 2.0))
        assert process.captured == [(16, 16)]
