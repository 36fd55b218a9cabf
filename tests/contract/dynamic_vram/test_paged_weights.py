"""Paged weights: captures over fixed addresses give a plain model's results, however pages and LoRAs come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from compile_cache.backends.base import Call, Capabilities, CaptureFacts, Program
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING
from compile_cache.config import CacheConfig
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec

from .fake_paging import HOST, LORAS, PAGE, Checkpoint, PagedModel, Reservation, compute, fill

SIZES = (1, 2, 3)


@pytest.fixture
def paging(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("dynamic_vram.paged_weights")


@pytest.fixture
def epochs(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("module_state.module_state")


class Capture:
    """Computes with the very tensors that were in the model when it was made."""

    bytes = 1

    def __init__(self, model: PagedModel) -> None:
        self._weights = [(block.weight, block.bias) for block in model.blocks] + [(model.small, model.table)]
        assert not any(weight.device.type == HOST for weight, _ in self._weights)
        self.failure: Exception | None = None

    def replay(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.failure is not None:
            raise self.failure
        (x,) = tensors
        for weight, bias in self._weights:
            x = compute(x, weight, bias)
        return x

    def close(self) -> None:
        self._weights.clear()


class CapturingProgram(Program):
    def __init__(self, model: PagedModel) -> None:
        super().__init__(1, Capabilities(available=True, compiles=True, captures=True))
        self.model = model

    def run(self, call: Call) -> Any:
        return call.invoke(call.tensors)

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> Capture:
        assert torch.equal(call.invoke(call.tensors), result)
        return Capture(self.model)


class Compiled:
    """A checkpoint whose calls go through a cache, as the adapter's `CompiledForward` and `ModuleRunner` do it."""

    def __init__(self, epochs: ModuleType, counts_pins: bool = True, unsupported: str | None = None) -> None:
        self.checkpoint = Checkpoint(reservation=Reservation(16, counts_pins=counts_pins))
        self.model = self.checkpoint.model
        self.cache = GraphCache(CacheConfig())
        self.program = CapturingProgram(self.model)
        self.weights = epochs.ModuleState(self.model, fill=fill, host=HOST, unsupported=unsupported)
        self.needs_memory = False  # a forward takes so much that all pages go that are not pinned
        self._inspect = True

    def load(self, lora: str = "") -> None:
        self.checkpoint.load(lora)
        self._inspect = True
        self.weights.paged.loaded()

    def unload(self) -> None:
        self.checkpoint.unload()
        self._inspect = True
        if not self.cache.captures_of(self.program.owner):
            self.weights.stable_addresses.forget()

    def run(self, size: int = 1) -> torch.Tensor:
        x = torch.arange(size, dtype=torch.float32)
        inspect, self._inspect = self._inspect, False
        inspected = self.weights.refresh()
        call = self._call(x)

        def recheck() -> Call:
            nonlocal call
            self.weights.refresh(inspect_modules=True)
            if self.weights.epoch != call.epoch:
                call = self._call(x)
            return call

        return self.cache.run(self.program, call, recheck if inspect and not inspected else None)

    def _call(self, x: torch.Tensor) -> Call:
        signature = Signature((("latent", TensorSpec(tuple(x.shape), "float32", "cpu")),))
        return Call(
            key=GraphKey(signature, Role.UNET, "model", "fake"),
            tensors=[x],
            invoke=self._invoke,
            device="cpu",
            epoch=self.weights.epoch,
            policy=ANYTHING.run_once(self.weights.blocker),
            weights=self.weights.paged,
        )

    def _invoke(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.needs_memory:
            self.checkpoint.reservation.evict(self.checkpoint.reservation.pages)
            self.checkpoint.reservation.prioritize()
        result: torch.Tensor = self.model(*tensors)
        return result

    def check(self, size: int = 1) -> None:
        """Run a call, and compare it with a plain model."""
        originals = {name: each for name, each in self.model.named_parameters() if each.device.type == HOST}
        assert torch.equal(self.run(size), self.checkpoint.expected(torch.arange(size, dtype=torch.float32)))
        after = dict(self.model.named_parameters())
        assert all(after[name] is each for name, each in originals.items()), "a parameter was not put back"
        assert not any(self.checkpoint.reservation.pins)

    def counted(self, name: str) -> int:
        snapshot = self.cache.stats.snapshot()
        return snapshot[name] if name in snapshot else snapshot["bypasses"].get(name, 0)

    @property
    def span(self) -> int:
        """Pages from the first to the last one with weights."""
        at = [block._v for block in self.model.blocks if "_v" in block.__dict__]
        start, stop = min(each[1] for each in at), max(each[1] + each[2] for each in at)
        return len(at[0][0].range(start, stop - start))

    @property
    def needed(self) -> int:
        """Pages with weights."""
        at = [block._v for block in self.model.blocks if "_v" in block.__dict__]
        return len({page for reservation, start, size in at for page in reservation.range(start, size)})


class Paging(RuleBasedStateMachine):
    """Everything that happens to a model in any order, and calls between."""

    def __init__(self, epochs: ModuleType) -> None:
        super().__init__()
        self.compiled = Compiled(epochs)
        self.checkpoint = self.compiled.checkpoint
        self.reservation = self.checkpoint.reservation
        self.captured: set[tuple[int, int]] = set()  # (layout, size)
        self.captures = 0
        self.may_ask = True

    @initialize()
    def load_it(self) -> None:
        self.compiled.load("")

    @rule(lora=st.sampled_from(LORAS), size=st.sampled_from(SIZES))
    def prompt(self, lora: str, size: int) -> None:
        self.load(lora)
        self.call(size)

    @rule(lora=st.sampled_from(LORAS))
    def load(self, lora: str) -> None:
        self.compiled.load(lora)
        self.may_ask = True

    @rule(lora=st.sampled_from(LORAS))
    def load_the_same_model_without_the_node(self, lora: str) -> None:
        """Another clone of the patcher, which is not compiled, runs once; then ComfyUI loads ours again."""
        ours = self.checkpoint.lora
        assert ours is not None
        self.checkpoint.load(lora)
        x = torch.ones(1)
        assert torch.equal(self.compiled.model(x), self.checkpoint.expected(x))
        self.load(ours)

    @rule()
    def unload(self) -> None:
        if self.checkpoint.is_loaded:
            self.compiled.unload()

    @rule(pages=st.integers(1, 6))
    def evict(self, pages: int) -> None:
        self.reservation.evict(pages)

    @rule(room=st.integers(0, 8))
    def leave_room_for(self, room: int) -> None:
        self.reservation.limit(room)

    @rule()
    def leave_room_for_all(self) -> None:
        self.reservation.limit(self.reservation.pages)

    @rule(watermark=st.integers(0, 6))
    def refuse_pages(self, watermark: int) -> None:
        self.reservation.watermark = watermark

    @rule(times=st.integers(1, 3))
    def let_the_driver_fail(self, times: int) -> None:
        self.reservation.failures = times

    @rule()
    def free_captures(self) -> None:
        self.compiled.cache.trim()
        self.captured.clear()

    @precondition(lambda self: self.checkpoint.is_loaded)
    @rule()
    def run_without_the_node(self) -> None:
        x = torch.ones(1)
        assert torch.equal(self.compiled.model(x), self.checkpoint.expected(x))

    @precondition(lambda self: self.checkpoint.is_loaded)
    @rule(size=st.sampled_from(SIZES))
    def call(self, size: int) -> None:
        names = ("captures", "replays", "streamed_weights", "eager_calls")
        surely = self.reservation.room >= self.compiled.span and not self.reservation.failures
        surely &= self.may_ask or self.reservation.watermark == self.reservation.pages
        surely_not = self.reservation.room < self.compiled.needed
        asked, before = self.reservation.asked, [self.compiled.counted(name) for name in names]
        self.compiled.check(size)
        captures, replays, streamed, eager = (
            self.compiled.counted(name) - count for name, count in zip(names, before, strict=True)
        )
        if self.reservation.asked != asked:
            self.may_ask = False
        self.reservation.failures = 0
        assert not eager
        assert captures + replays + streamed == 1
        assert not (surely and streamed)
        assert not (surely_not and not streamed)
        key = (self.checkpoint.layout, size)
        if not streamed:
            assert bool(captures) == (key not in self.captured)
            # A new layout drops the captures of all earlier ones.
            self.captured = {each for each in self.captured if each[0] == key[0]} | {key}

    @invariant()
    def nothing_is_pinned_between_calls(self) -> None:
        assert not any(self.reservation.pins)


@pytest.mark.parametrize("gap", [32 << 20, PAGE // 4], ids=["one range", "several ranges"])
def test_results_are_those_of_a_plain_model_whatever_happens_between(
    paging: ModuleType, epochs: ModuleType, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    monkeypatch.setattr(paging, "_GAP", gap)
    run_state_machine_as_test(
        lambda: Paging(epochs),
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def compiled(epochs: ModuleType) -> Compiled:
    compiled = Compiled(epochs)
    compiled.load()
    return compiled


def test_a_lora_that_resizes_a_weight_costs_one_capture_and_so_does_taking_it_off(compiled: Compiled) -> None:
    compiled.check()
    for lora in ("resizing", "", "a"):
        compiled.load(lora)
        compiled.check()
        compiled.check()
    assert compiled.counted("captures") == 3
    assert compiled.counted("streamed_weights") == 0


def test_a_lora_and_an_unload_cost_no_capture(compiled: Compiled) -> None:
    for lora in ("", "a", "b", ""):
        compiled.load(lora)
        for size in SIZES:
            compiled.check(size)
        compiled.unload()
    assert compiled.counted("captures") == len(SIZES)
    assert compiled.counted("replays") == 3 * len(SIZES)


TOO_OLD = "comfy-aimdo 0.2.14 pages the weights, and 0.3.0 is needed"


def test_weights_without_pages_are_held_where_pages_cannot_be(epochs: ModuleType) -> None:
    """ComfyUI 0.8.0 has no pages: its models are captured."""
    weights = epochs.ModuleState(nn.Linear(2, 2), host=HOST, unsupported=TOO_OLD).paged
    assert weights.pin()


@pytest.mark.parametrize(
    ("counts_pins", "unsupported"), [(True, None), (False, TOO_OLD)], ids=["pins are counted", "pins are flags"]
)
def test_a_call_that_drives_pages_out_is_right(epochs: ModuleType, counts_pins: bool, unsupported: str | None) -> None:
    compiled = Compiled(epochs, counts_pins, unsupported)
    compiled.needs_memory = True
    for lora in ("", "a"):
        compiled.load(lora)
        compiled.check()
        compiled.check()


def test_where_pins_are_flags_nothing_is_captured_and_the_reason_is_named(epochs: ModuleType) -> None:
    compiled = Compiled(epochs, counts_pins=False, unsupported=TOO_OLD)
    for lora in LORAS:
        compiled.load(lora)
        for size in SIZES:
            compiled.check(size)
        compiled.checkpoint.reservation.evict(3)
        compiled.check()
        compiled.unload()
    assert compiled.counted("captures") == 0
    assert compiled.counted("streamed_weights") == len(LORAS) * (len(SIZES) + 1)
    assert compiled.weights.blocker.detail == f"{TOO_OLD}, so ComfyUI loads them itself"


def test_while_nothing_happens_no_module_is_filled_again(compiled: Compiled) -> None:
    compiled.check()
    fills = compiled.checkpoint.fills
    for _ in range(3):
        compiled.check()
    assert compiled.checkpoint.fills == fills


def test_only_modules_of_pages_that_went_are_filled_again(compiled: Compiled) -> None:
    compiled.check()
    fills = compiled.checkpoint.fills
    compiled.checkpoint.reservation.evict(1)  # the highest one, which has the last module's end
    compiled.check()
    assert compiled.checkpoint.fills == fills + 1


def test_memory_is_asked_for_once_in_each_load(compiled: Compiled) -> None:
    reservation = compiled.checkpoint.reservation
    reservation.limit(1)
    asked = reservation.asked
    for _ in range(3):
        compiled.check()
    assert reservation.asked == asked + 1
    assert compiled.counted("streamed_weights") == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), ValueError("a broken LoRA")], ids=repr)
def test_a_fill_that_fails_is_left_to_core_and_leaves_nothing_pinned(paging: ModuleType, error: Exception) -> None:
    checkpoint = Checkpoint()
    checkpoint.load("")

    def failing(module: Any, dtype: torch.dtype) -> None:
        raise error

    weights = paging.PagedWeights(failing)
    weights.survey(checkpoint.model.modules())
    assert not weights.pin()
    assert not any(checkpoint.reservation.pins)


class TestStableAddresses:
    @pytest.fixture
    def kept(self, adapter: Callable[[str], ModuleType]) -> Any:
        return adapter("module_state.module_state").StableAddresses(host=HOST)

    def test_a_tensor_keeps_its_address_and_gets_the_new_values(self, kept: Any) -> None:
        own: dict[str, Any] = {"table": torch.ones(3), "small": nn.Parameter(torch.ones(2))}
        slots = [(own, name) for name in own]
        kept.keep(slots)
        before = dict(own)
        own.update(table=torch.full((3,), 2.0), small=nn.Parameter(torch.full((2,), 3.0)))
        kept.keep(slots)
        assert all(own[name] is before[name] for name in own)
        assert own["table"].tolist() == [2.0] * 3
        assert own["small"].tolist() == [3.0] * 2

    @pytest.mark.parametrize(
        "other",
        [
            torch.zeros(4),
            torch.zeros(3, dtype=torch.float16),
            nn.Parameter(torch.zeros(3)),
            torch.zeros(6)[::2],
            torch.empty(3, device=HOST),
        ],
        ids=["size", "dtype", "class", "stride", "on the host"],
    )
    def test_another_kind_of_tensor_takes_the_place(self, kept: Any, other: torch.Tensor) -> None:
        own: dict[str, Any] = {"table": torch.ones(3)}
        kept.keep([(own, "table")])
        own["table"] = other
        kept.keep([(own, "table")])
        assert own["table"] is other

    def test_after_forget_new_tensors_stay_where_they_are(self, kept: Any) -> None:
        own: dict[str, Any] = {"table": torch.ones(3)}
        kept.keep([(own, "table")])
        kept.forget()
        own["table"] = new = torch.zeros(3)
        kept.keep([(own, "table")])
        assert own["table"] is new
