"""The work of a ControlNet in a sampling run counts once, in its own run."""

from __future__ import annotations

from typing import Any

import pytest

from compile_cache.calls import rows
from compile_cache.calls.run_summary import Run, together, without
from compile_cache.stats import Stats

START = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [START]
    monkeypatch.setattr("compile_cache.stats.time.time", lambda: now[0])
    return now


def compiles(stats: Stats, clock: list[float], regions: int, seconds: float) -> None:
    with stats.stalling("compile"):
        clock[0] += seconds
        stats.counters.region_compiles += regions
    stats.counters.graph_calls += 1


def run(changes: dict[str, Any], role: str, seconds: float) -> Run:
    usual = {"model": "SD15", "width": 64, "height": 64, "batch": 1, "steps": 2, "cell": 8, "started": START}
    return Run(**usual, role=role, seconds=seconds, **changes)


def test_what_a_controlnet_compiles_is_not_said_of_the_model_too(clock: list[float]) -> None:
    stats = Stats(clock=lambda: clock[0])
    begun, calls = stats.mark(), []
    for net, model in ((9.0, 20.0), (1.0, 0.0)):
        mark = stats.mark()
        compiles(stats, clock, 3, net)
        calls.append(stats.since(mark))
        compiles(stats, clock, 0 if not model else 5, model)  # at once: its wait is no part of the other one
    clock[0] += 4.0
    control = together(calls)
    found = run(without(stats.since(begun), control), "unet", 34.0)
    assert rows.status(found) == "64x64: compiled 5 regions in 20.0 s, 2.0 s/step"
    assert rows.status(run(control, "controlnet", 34.0)) == "64x64: compiled 6 regions in 10.0 s"
    assert rows.log_line(found) == "2 calls through regions, 5 region compiles, waited 20.0 s"
    waited = sum(each["seconds"] for each in found.segments() if each["kind"] == "compile")
    assert waited == pytest.approx(30.0), "the sampling run took that long"
    assert [wait.seconds for wait in found.waits] == [20.0]
    nothing = stats.since(stats.mark())
    assert run(nothing, "unet", 4.0).is_plain
    assert not run({**nothing, "beside": control["waits"]}, "unet", 14.0).is_plain, "others take no such time"


def test_regions_that_a_thread_loads_ahead_are_no_work_of_the_run_that_they_fall_into() -> None:
    stats = Stats()
    mark = stats.mark()
    stats.counters.region_loads += 19
    stats.counters.region_preloads += 18
    assert stats.since(mark)["counts"]["region_loads"] == 1
