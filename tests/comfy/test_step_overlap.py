"""Overlapping steps: conditioning is moved once, each step waits for the one before. See docs/measured.md."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ELSEWHERE = torch.device("meta")
ONE_GPU: dict[str, Any] = {"model_options": {}}


@pytest.fixture(scope="module")
def overlap(core: SimpleNamespace) -> ModuleType:
    module: ModuleType = core.ours("sampling.step_overlap")
    return module


def test_only_conditioning_that_core_copies_in_every_step_is_moved(core: SimpleNamespace, overlap: ModuleType) -> None:
    kinds = core.comfy.conds

    class OfAnotherPack(kinds.CONDRegular):  # type: ignore[misc, name-defined]
        pass

    text, pooled = kinds.CONDCrossAttn(torch.ones(1, 4, 4)), kinds.CONDRegular(torch.ones(1, 4))
    stays = {
        "cut by area": kinds.CONDNoiseShape(torch.ones(1, 4)),
        "a constant": kinds.CONDConstant(3),
        "a list": kinds.CONDList([torch.ones(1)]),
        "foreign": OfAnotherPack(torch.ones(1, 4)),
        "no tensor": kinds.CONDRegular([1]),
        "there already": kinds.CONDRegular(torch.ones(1, device=ELSEWHERE)),
    }
    conds = {"positive": [{"model_conds": {"text": text, "pooled": pooled, **stays}, "strength": 0.5}], "negative": []}
    moved = overlap.on_device(conds, ELSEWHERE)
    (own,) = moved["positive"]
    assert moved["negative"] == []
    assert own["strength"] == 0.5
    for name, before in (("text", text), ("pooled", pooled)):
        assert own["model_conds"][name].cond.device == ELSEWHERE
        assert type(own["model_conds"][name]) is type(before)
        assert before.cond.device.type == "cpu"  # other samplers share it, so it must not move
    for name, before in stays.items():
        assert own["model_conds"][name] is before


def test_large_conditioning_is_not_moved_and_shared_tensors_count_once(
    core: SimpleNamespace, overlap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (core.comfy.conds.CONDCrossAttn(torch.ones(1, 4, 4)) for _ in range(2))
    monkeypatch.setattr(overlap, "_MAX_BYTES", 2 * one.cond.nbytes - 1)
    shared = {"positive": [{"model_conds": {"text": one}}, {"model_conds": {"text": one}}]}
    first, second = overlap.on_device(shared, ELSEWHERE)["positive"]
    assert first["model_conds"]["text"].cond.device == ELSEWHERE
    assert first["model_conds"]["text"] is second["model_conds"]["text"]
    both = {"positive": [{"model_conds": {"text": one}}], "negative": [{"model_conds": {"text": other}}]}
    assert overlap.on_device(both, ELSEWHERE) is both


class Guider:
    """The part of core's guider that the wrapper uses."""

    def __init__(self, core: SimpleNamespace, device: str) -> None:
        self.model_patcher = SimpleNamespace(load_device=torch.device(device))
        self.conds: Any = {"positive": [{"model_conds": {"text": core.comfy.conds.CONDCrossAttn(torch.ones(1, 2, 2))}}]}

    @property
    def text(self) -> torch.device:
        device: torch.device = self.conds["positive"][0]["model_conds"]["text"].cond.device
        return device


@pytest.fixture
def order(overlap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A log of all calls, with fake CUDA events that only write to it."""
    happened: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            self.number = sum("recorded" in each for each in happened)
            happened.append(f"event {self.number} recorded on {stream}")

        def synchronize(self) -> None:
            happened.append(f"waited for {self.number}")

    fake = SimpleNamespace(Event=Event, current_stream=lambda device: device)
    monkeypatch.setattr(overlap, "torch", SimpleNamespace(cuda=fake, Tensor=torch.Tensor))
    real = overlap.on_device
    monkeypatch.setattr(overlap, "on_device", lambda conds, _: real(conds, ELSEWHERE))
    return happened


def test_each_callback_waits_until_the_step_before_is_done(
    core: SimpleNamespace, overlap: ModuleType, order: list[str]
) -> None:
    guider = Guider(core, "cuda:0")

    def sampler(guider: Guider, sigmas: Any, extra_args: Any, callback: Any, *rest: Any, **named: Any) -> Any:
        assert guider.text == ELSEWHERE
        for step in range(3):
            assert callback(step, None, x=None, total_steps=3) == step
        return sigmas, extra_args, rest, named

    def callback(step: int, *_: Any, **__: Any) -> int:
        order.append(f"step {step}")
        return step

    assert overlap.overlap_steps(sampler, guider, 1, ONE_GPU, callback, 3, four=4) == (1, ONE_GPU, (3,), {"four": 4})
    assert guider.text.type == "cpu"
    assert order == [
        "event 0 recorded on cuda:0", "step 0",
        "event 1 recorded on cuda:0", "waited for 0", "step 1",
        "event 2 recorded on cuda:0", "waited for 1", "step 2",
    ]  # fmt: skip


def test_a_sampler_without_a_callback_waits_too(core: SimpleNamespace, overlap: ModuleType, order: list[str]) -> None:
    def sampler(guider: Guider, sigmas: Any, extra_args: Any, callback: Any) -> None:
        for step in range(2):
            callback(step, None, None, 2)

    overlap.overlap_steps(sampler, Guider(core, "cuda"), 1, ONE_GPU, None)
    assert order[-1] == "waited for 0"


def test_a_failed_run_restores_the_conditioning(core: SimpleNamespace, overlap: ModuleType, order: list[str]) -> None:
    guider = Guider(core, "cuda")

    def fails(*_: Any) -> None:
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        overlap.overlap_steps(fails, guider, 1, ONE_GPU, None)
    assert guider.text.type == "cpu"
    assert not order


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), ("cuda", {"multigpu_clones": {}})], ids=["no GPU", "several GPUs"]
)
def test_on_other_devices_nothing_changes(
    core: SimpleNamespace, overlap: ModuleType, device: str, options: dict[str, Any]
) -> None:
    guider, own = Guider(core, device), lambda *_: None
    conds = guider.conds

    def sampler(guider: Guider, sigmas: Any, extra_args: Any, callback: Any) -> None:
        assert guider.conds is conds
        assert callback is own

    overlap.overlap_steps(sampler, guider, 1, {"model_options": options}, own)


def test_both_nodes_overlap_steps_but_only_once(core: SimpleNamespace, overlap: ModuleType) -> None:
    model = core.tiny_model().build(0, "sd")[0]
    settings = core.ours("deepcache.schedule").Settings()
    model = core.ours("compile.diffusion_model").compile_diffusion_model(model, "eager")
    for _ in range(2):
        model = core.ours("deepcache.node").add_deepcache(model, settings)
    kind = core.comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE
    assert model.wrappers[kind]["resolute-overlap"] == [overlap.overlap_steps]
