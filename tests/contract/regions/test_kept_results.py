"""Results of prologues, kept by the values of their inputs: what is computed again, and what is dropped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_cache.regions.dependence import SOURCES, TEXT, TIME
from compile_cache.regions.kept_results import Inputs, KeptResults

BLOCKS = 3
BYTES = 4 * 2 * 4  # of one result for one row


class Model:
    """Blocks with a prologue of the time and one of the text."""

    def __init__(self, kept: KeptResults) -> None:
        self.kept = kept
        self.ran: list[tuple[str, int]] = []

    def call(self, time: torch.Tensor, text: torch.Tensor) -> list[torch.Tensor]:
        return [
            self.kept.get((source, block), source, [tensor], functools.partial(self._compute, source, block))[0]
            for block in range(BLOCKS)
            for source, tensor in ((TIME, time), (TEXT, text))
        ]

    def _compute(self, source: str, block: int, several: Sequence[Inputs]) -> list[list[torch.Tensor]]:
        self.ran.append((source, block))
        return [[self._value(block, tensor)] for (tensor,) in several]

    @staticmethod
    def _value(block: int, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor * (block + 1)], dim=1)

    def expected(self, time: torch.Tensor, text: torch.Tensor) -> list[torch.Tensor]:
        return [self._value(block, tensor) for block in range(BLOCKS) for tensor in (time, text)]


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def rows(value: float, batch: int = 1) -> torch.Tensor:
    return torch.full((batch, 4), value)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_prologue_runs_once_for_each_time_and_batch_and_once_for_each_text(mode: Any) -> None:
    kept = KeptResults(1 << 20)
    model = Model(kept)
    with mode():
        for level in (0.9, 0.5, 0.5, 0.9):  # a sampler that comes back to a noise level
            for text in (1.0, 2.0):
                for batch in (1, 2):
                    given = rows(level, batch), rows(text, batch)  # core makes new tensors for each call
                    assert same(model.call(*given), model.expected(*given))
    assert kept.computed == {TIME: 4 * BLOCKS, TEXT: 4 * BLOCKS}
    assert kept.reused == {TIME: 12 * BLOCKS, TEXT: 12 * BLOCKS}


def test_the_values_of_an_input_are_read_once_for_a_call_and_not_for_a_block() -> None:
    kept = KeptResults(1 << 20)
    model = Model(kept)
    for _ in range(5):
        model.call(rows(1.0), rows(2.0))
    assert kept.reads == 5 * len(SOURCES)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_other_values_in_the_same_tensor_are_seen_at_the_next_call(mode: Any) -> None:
    model = Model(KeptResults(1 << 20))
    with mode():
        time, text = rows(1.0), rows(2.0)
        model.call(time, text)
        time.fill_(3.0)
        assert same(model.call(time, text), model.expected(time, text))


def test_values_that_compare_equal_and_have_other_bits_are_not_the_same() -> None:
    model = Model(KeptResults(1 << 20))
    model.call(rows(0.0), rows(1.0))
    assert bool(torch.signbit(model.call(rows(-0.0), rows(1.0))[0]).all())


def test_a_large_text_is_known_by_all_of_its_values() -> None:
    kept = KeptResults(1 << 20)
    text = torch.zeros(1, 1 << 14)
    other = text.clone()
    other[0, -1] = 1
    found = [
        kept.get("block", TEXT, [each], lambda several: [[each + 1] for (each,) in several])[0]
        for each in (text, other)
    ]
    assert torch.equal(found[1], other + 1)


def test_a_large_text_that_comes_again_is_found_whatever_came_between() -> None:
    kept = KeptResults(1 << 20)
    texts = [torch.full((1, 1 << 13), float(value)) for value in range(4)]
    for text in (*texts, *texts):
        (found,) = kept.get("block", TEXT, [text.clone()], lambda several: [[each[:, :2] + 1] for (each,) in several])
        assert torch.equal(found, text[:, :2] + 1)
        assert kept.bytes <= kept.limit
    assert (kept.computed, kept.reused) == ({TEXT: 4}, {TEXT: 4})


def test_large_values_that_compare_equal_and_have_other_bits_are_not_the_same() -> None:
    kept = KeptResults(1 << 20)
    zeros = torch.zeros(1, 1 << 13)
    for text in (zeros, -zeros):
        (found,) = kept.get("block", TEXT, [text], lambda several: [[each[:, :2] * 1] for (each,) in several])
        assert bool(torch.signbit(found).all()) is (text is not zeros)


def test_it_holds_no_more_than_its_limit_and_drops_the_oldest_noise_level() -> None:
    limit = 2 * (BLOCKS * BYTES) * 2  # two noise levels, and two texts
    kept = KeptResults(limit)
    model = Model(kept)
    for level in (0.9, 0.7, 0.5, 0.3):
        model.call(rows(level), rows(1.0))
        assert kept.bytes <= limit
    model.ran.clear()
    model.call(rows(0.3), rows(1.0))
    assert model.ran == []
    model.call(rows(0.9), rows(1.0))
    assert model.ran == [(TIME, block) for block in range(BLOCKS)]


def test_what_finds_no_room_is_computed_in_each_call() -> None:
    kept = KeptResults(BYTES)  # of one block
    model = Model(kept)
    for _ in range(2):
        given = rows(0.9), rows(1.0)
        assert same(model.call(*given), model.expected(*given))
        assert kept.bytes <= kept.limit
    assert kept.reused[TIME] + kept.reused[TEXT] == 1


def test_nothing_is_known_after_the_weights_changed() -> None:
    kept = KeptResults(1 << 20)
    model = Model(kept)
    model.call(rows(1.0), rows(2.0))
    kept.forget()
    assert kept.bytes == 0
    model.ran.clear()
    model.call(rows(1.0), rows(2.0))
    assert len(model.ran) == 2 * BLOCKS


def test_a_result_keeps_no_memory_of_its_input_nor_of_a_larger_tensor() -> None:
    kept = KeptResults(1 << 20)
    text, large = torch.zeros(2, 4), torch.zeros(100, 4)
    view, part = kept.get("block", TEXT, [text], lambda several: [[text[:, None], large[:1]]])
    text.fill_(1)
    large.fill_(1)
    assert not view.any()
    assert part.untyped_storage().nbytes() == part.nbytes


def test_results_ahead_are_computed_with_the_first_and_then_only_used() -> None:
    kept = KeptResults(1 << 20)
    later = [[rows(0.5)], [rows(0.3)]]
    kept.remember([tensor for inputs in later for tensor in inputs])
    asked: list[int] = []

    def compute(several: Sequence[Inputs]) -> list[list[torch.Tensor]]:
        asked.append(len(several))
        return [[tensor * 2] for (tensor,) in several]

    for level in (0.9, 0.5, 0.3, 0.9):
        (found,) = kept.get("block", TIME, [rows(level)], compute, lambda: later)
        assert torch.equal(found, rows(level) * 2)
    assert asked == [3]
    assert (kept.computed, kept.reused) == ({TIME: 3}, {TIME: 3})


def test_results_ahead_push_nothing_out() -> None:
    kept = KeptResults(2 * 4 * 4)
    later = [[rows(0.5)], [rows(0.3)], [rows(0.1)]]

    def compute(several: Sequence[Inputs]) -> list[list[torch.Tensor]]:
        return [[tensor * 2] for (tensor,) in several]

    kept.get("block", TIME, [rows(0.9)], compute, lambda: later)
    assert kept.bytes == kept.limit
    kept.get("block", TIME, [rows(0.9)], compute, lambda: later)
    assert kept.reused == {TIME: 1}


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.tuples(st.sampled_from(["time", "text", "batch"]), st.integers(0, 2)), max_size=12))
def test_of_one_changed_input_exactly_what_depends_on_it_is_computed(changes: list[tuple[str, int]]) -> None:
    model = Model(KeptResults(1 << 20))
    now = {"time": 0, "text": 0, "batch": 0}
    seen: dict[str, set[tuple[int, int]]] = {TIME: set(), TEXT: set()}
    for name, value in [("time", 0), *changes]:
        now[name] = value
        given_now = rows(float(now["time"]), 1 + now["batch"]), rows(float(now["text"]), 1 + now["batch"])
        model.ran.clear()
        assert same(model.call(*given_now), model.expected(*given_now))
        new = [source for source in SOURCES if (now[source], now["batch"]) not in seen[source]]
        assert sorted(model.ran) == sorted((source, block) for source in new for block in range(BLOCKS))
        for source in SOURCES:
            seen[source].add((now[source], now["batch"]))
