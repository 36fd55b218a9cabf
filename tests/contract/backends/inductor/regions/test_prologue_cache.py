"""Results of prologues, kept by the values of their inputs: what is computed again, and what is dropped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_cache.backends.inductor.regions import prologue_cache
from compile_cache.backends.inductor.regions.prologue_cache import Content, Inputs, PrologueCache, values_of
from compile_cache.telemetry.stats import Counters

BLOCKS = 3
BYTES = 4 * 2 * 4  # of one result for one row


class Model:
    """Blocks with a prologue of the time."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.counters = Counters()
        self.kept = PrologueCache(limit, self.counters)
        self.ran: list[int] = []

    def call(self, time: torch.Tensor, ahead: Mapping[Content, Inputs] = MappingProxyType({})) -> None:
        """Each block gets the results for the very bits of the time."""
        for block in range(BLOCKS):
            (found,) = self.kept.get(block, [time], functools.partial(self._compute, block), lambda: ahead)
            assert torch.equal(found.view(torch.int32), self._value(block, time).view(torch.int32))

    def _compute(self, block: int, several: Sequence[Inputs]) -> list[list[torch.Tensor]]:
        self.ran += [block] * len(several)
        return [[self._value(block, tensor)] for (tensor,) in several]

    @staticmethod
    def _value(block: int, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor * (block + 1)], dim=1)

    @property
    def counted(self) -> tuple[int, int]:
        return self.counters.prologue_runs, self.counters.prologue_reuses


def rows(value: float, batch: int = 1) -> torch.Tensor:
    return torch.full((batch, 4), value)


def ahead_of(*levels: float) -> dict[Content, Inputs]:
    return {values_of(inputs): inputs for inputs in ([rows(level)] for level in levels)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_prologue_runs_once_for_each_time_and_batch(mode: Any) -> None:
    model = Model()
    with mode():
        for level in (0.9, 0.5, 0.5, 0.9):  # a sampler that comes back to a noise level
            for batch in (1, 2):
                model.call(rows(level, batch))  # core makes new tensors for each call
    assert model.counted == (4 * BLOCKS, 4 * BLOCKS)


def test_the_values_of_an_input_are_read_once_for_a_call_and_not_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = Model(), []
    monkeypatch.setattr(prologue_cache, "values_of", lambda inputs: reads.append(inputs) or values_of(inputs))
    for _ in range(5):
        model.call(rows(1.0))
    assert len(reads) == 5 + (BLOCKS - 1), "and for each block of the first, which computes"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_other_values_in_the_same_tensor_are_seen_at_the_next_call(mode: Any) -> None:
    model = Model()
    with mode():
        time = rows(1.0)
        model.call(time)
        time.fill_(3.0)
        model.call(time)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("foresees", [False, True])
def test_a_write_between_two_blocks_of_a_call_is_seen(mode: Any, foresees: bool) -> None:
    model = Model()
    levels = (0.9, 0.5, 0.9, 0.3)
    with mode():
        later = ahead_of(*levels) if foresees else {}
        for level in levels:
            time = rows(level)
            for block in range(BLOCKS):
                (found,) = model.kept.get(block, [time], functools.partial(model._compute, block), lambda: later)
                assert torch.equal(found, model._value(block, time))
                time.mul_(2)


def test_a_write_in_a_later_step_than_the_first_is_seen_by_torchs_count_of_writes() -> None:
    """One block's result is the input of the next, and the first step's happened to be the same."""
    model = Model()
    with torch.inference_mode():
        for level, factor in ((0.9, 1), (1.8, 1), (0.9, 2)):
            with torch.inference_mode(False), torch.no_grad():
                time = rows(level)
            for block in range(BLOCKS):
                (found,) = model.kept.get(block, [time], functools.partial(model._compute, block))
                assert torch.equal(found, model._value(block, time))
                time.mul_(factor)


def test_torch_counts_no_writes_to_tensors_that_were_made_in_inference_mode() -> None:
    """So a write as in the test above cannot be seen there, without a wait for the GPU at each block."""
    with torch.inference_mode():
        time = rows(0.9)
        assert time.is_inference()
        with pytest.raises(RuntimeError, match="version"):
            time._version  # noqa: B018
        assert time.add(1).is_inference(), "nor to what a model computes from it"


def test_values_that_compare_equal_and_have_other_bits_are_not_the_same() -> None:
    model = Model()
    for time in (rows(0.0), rows(-0.0), torch.zeros(1, 1 << 14), -torch.zeros(1, 1 << 14)):
        model.call(time)


def test_what_finds_no_room_drops_the_rest() -> None:
    model = Model(limit=2 * BLOCKS * BYTES)  # two noise levels
    for level in (0.9, 0.7, 0.5):
        model.call(rows(level))
        assert model.kept.bytes == model.counters.kept_bytes <= model.kept.limit
    model.ran.clear()
    model.call(rows(0.5))
    assert model.ran == []
    model.call(rows(0.9))
    assert model.ran == [0, 1, 2]


def test_what_is_larger_than_the_limit_is_computed_in_each_call() -> None:
    model = Model(limit=BYTES - 1)
    for _ in range(2):
        model.call(rows(0.9))
    assert (model.counted, model.kept.bytes) == ((2 * BLOCKS, 0), 0)


def test_nothing_is_known_after_the_weights_changed() -> None:
    model = Model()
    model.call(rows(1.0))
    model.kept.forget()
    assert model.kept.bytes == model.counters.kept_bytes == 0
    model.ran.clear()
    model.call(rows(1.0))
    assert model.ran == [0, 1, 2]


def test_a_result_keeps_no_memory_of_its_input_nor_of_a_larger_tensor() -> None:
    kept = PrologueCache(1 << 20)
    time, large = torch.zeros(2, 4), torch.zeros(100, 4)
    view, part = kept.get("block", [time], lambda several: [[time[:, None], large[:1]]])
    time.fill_(1)
    large.fill_(1)
    assert not view.any()
    assert part.untyped_storage().nbytes() == part.nbytes


def test_results_ahead_are_computed_with_the_first_and_then_only_used() -> None:
    model = Model()
    later = ahead_of(0.5, 0.3)
    for level in (0.9, 0.5, 0.3, 0.9):
        model.call(rows(level), later)
    assert model.ran == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert model.counted == (3 * BLOCKS, 3 * BLOCKS)


def test_results_ahead_push_nothing_out() -> None:
    model = Model(limit=(BLOCKS + 1) * BYTES)
    later = ahead_of(0.5, 0.3, 0.1)
    model.kept.get("another", [rows(0.9)], lambda several: [[each * 1] for (each,) in several], lambda: later)
    assert model.kept.bytes == 4 * 4 * 4
    model.kept.get("another", [rows(0.9)], lambda several: [], lambda: later)
    assert model.counted == (4, 1)
    small = PrologueCache(2 * 4 * 4)
    small.get("block", [rows(0.9)], lambda several: [[each * 2] for (each,) in several], lambda: later)
    assert small.bytes == small.limit
    small.get("block", [rows(0.9)], lambda several: [])


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.tuples(st.sampled_from(["time", "batch"]), st.integers(0, 2)), max_size=12))
def test_of_one_changed_input_exactly_what_depends_on_it_is_computed(changes: list[tuple[str, int]]) -> None:
    model, now = Model(), {"time": 0, "batch": 0}
    seen: set[tuple[int, int]] = set()
    for name, value in [("time", 0), *changes]:
        now[name] = value
        model.ran.clear()
        model.call(rows(float(now["time"]), 1 + now["batch"]))
        key = (now["time"], now["batch"])
        assert model.ran == ([] if key in seen else list(range(BLOCKS)))
        seen.add(key)
