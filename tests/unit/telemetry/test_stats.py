"""Counters and events."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from compile_cache.errors import BypassCode, BypassReason
from compile_cache.telemetry.stats import Stats

STREAMED = BypassReason(BypassCode.STREAMED_WEIGHTS, "low VRAM")


def test_a_reason_is_new_once_and_counted_every_time() -> None:
    stats = Stats()
    assert [stats.bypass(STREAMED) for _ in range(3)] == [True, False, False]
    assert stats.counters.bypasses == {"streamed_weights": 3}
    assert [event.kind for event in stats.events] == ["bypass"]


def test_another_detail_of_the_same_code_is_new_and_counted_under_the_code() -> None:
    stats = Stats()
    stats.bypass(STREAMED)
    assert stats.bypass(replace(STREAMED, detail="DynamicVRAM"))
    assert stats.counters.bypasses == {"streamed_weights": 2}


def test_events_are_limited_and_the_newest_are_kept() -> None:
    stats = Stats()
    for number in range(5000):
        stats.event("compile", str(number))
    assert len(stats.events) < 5000
    assert stats.events[-1].text == "4999"


def test_a_snapshot_is_plain_data_and_does_not_change_with_the_counters() -> None:
    stats = Stats()
    stats.bypass(STREAMED)
    stats.counters.replays = 2
    before = stats.snapshot()
    stats.counters.replays += 1
    stats.bypass(STREAMED)
    assert json.loads(json.dumps(before)) == before
    assert before["replays"] == 2
    assert before["bypasses"] == {"streamed_weights": 1}
    assert set(before) == set(vars(stats.counters))


def test_a_snapshot_is_consistent_while_another_thread_counts() -> None:
    stats = Stats()

    class Meanwhile(str):
        def __deepcopy__(self, memo: object) -> str:
            stats.counters.bypasses[f"{self}, another"] += 1
            return self

    stats.counters.bypasses[Meanwhile("one")] += 1
    assert stats.snapshot()["bypasses"] == {"one": 1}


def test_since_a_mark_only_what_came_later_counts() -> None:
    stats = Stats()
    stats.event("compile", "before")
    stats.bypass(STREAMED)
    stats.counters.replays = 2
    mark = stats.mark()
    assert (stats.since(mark)["events"], stats.since(mark)["bypasses"]) == ((), {})
    stats.counters.replays += 3
    stats.bypass(STREAMED)
    for number in range(3):
        stats.event("compile", str(number))
    rise = stats.since(mark)
    assert [event.text for event in rise["events"]] == ["0", "1", "2"]
    assert (rise["counts"]["replays"], rise["bypasses"]) == (3, {"streamed_weights": 1})
    for number in range(5000):
        stats.event("compile", str(number))
    assert len(stats.since(mark)["events"]) == len(stats.events)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_second_of_a_wait_has_one_kind_and_counts_once() -> None:
    clock = Clock()
    stats = Stats(clock)
    begin = stats.mark()
    with stats.stalling():
        clock.now += 1
        with stats.stalling("load"), stats.stalling("load"):
            clock.now += 2
        clock.now += 4
    assert [(wait.kind, wait.seconds) for wait in stats.since(begin)["waits"]] == [
        ("compile", 1),
        ("load", 2),
        ("compile", 4),
    ]
    assert stats.counters.stall_seconds == stats.waiting_seconds() == 7


def test_a_wait_that_ends_with_an_error_counts_until_then() -> None:
    clock = Clock()
    stats = Stats(clock)
    with pytest.raises(ValueError, match="stop"), stats.stalling():
        clock.now += 3
        raise ValueError("stop")
    clock.now += 1
    assert stats.waiting_seconds() == 3


def test_the_clock_of_waits_runs_while_a_prompt_waits_and_stands_when_it_does_not() -> None:
    clock = Clock()
    stats = Stats(clock)
    clock.now += 3
    assert stats.waiting_seconds() == 0
    with stats.stalling():
        clock.now += 2
        assert stats.waiting_seconds() == stats.snapshot()["stall_seconds"] == 2
    clock.now += 5
    assert stats.waiting_seconds() == 2


def test_what_turns_out_to_have_been_a_wait_counts_only_what_was_not_counted() -> None:
    clock = Clock()
    stats = Stats(clock)
    started, stalled = clock(), stats.waiting_seconds()
    clock.now += 4
    with stats.stalling("load"):
        clock.now += 1
    stats.waited_since(started, stalled, "compile", "for all regions")
    assert stats.waiting_seconds() == 5


def test_calls_in_a_row_that_wait_for_code_are_one_event_of_a_run() -> None:
    now = [0.0]
    stats = Stats(lambda: now[0])

    def call(compiled: bool = False, waits: bool = True) -> None:
        started = now[0]
        now[0] += 1.0
        stats.forward_ran(compiled, waits, started)

    def stretches() -> list[str]:
        return [event.text.partition(" calls")[0] for event in stats.events if event.kind == "originals"]

    mark = stats.mark()
    for number in range(3):
        call(compiled=number == 2)
        stats.event("trace", "between two calls")
    assert stretches() == ["3"]
    assert stats.events[0].seconds >= 1.0
    assert len(stats.since(mark)["events"]) == 4
    call(compiled=True, waits=False)
    call()
    stats.counters.replays += 1
    call()
    assert stretches() == ["3", "1", "1"]
    stats.mark()
    call()
    assert stretches() == ["3", "1", "1", "1"], "another run"
    for number in range(1100):
        stats.event("compile", str(number))
    call()
    assert stretches() == ["1"], "the earlier one is no longer kept"
