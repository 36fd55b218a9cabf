"""GraphCache beside a ControlNet, beside the thread of the server, and for the next process."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_cache.backends.base import Call, CaptureFacts
from compile_cache.cache.captures import Captures
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING
from compile_cache.config import CacheConfig
from compile_cache.telemetry import rows
from compile_cache.telemetry.run_summary import Run, merge, subtract
from compile_cache.telemetry.stats import Stats

from ..fakes import BUDGET, OBSERVED, FakeGraph, FakeProgram, Module, answer, session

# The work of a ControlNet in a sampling run counts once, in its own run.


START = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [START]
    monkeypatch.setattr("compile_cache.telemetry.stats.time.time", lambda: now[0])
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
    control = merge(calls)
    found = run(subtract(stats.since(begun), control), "unet", 34.0)
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


# Free from the thread of the server, while prompts capture and replay in theirs.


class Capturing(FakeProgram):
    """Takes a moment to capture; memory that is given back meanwhile would break a capture of CUDA's."""

    capturing = False

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> FakeGraph:
        self.capturing = True
        time.sleep(0.001)
        graph = super().capture(call, result, facts)
        self.capturing = False
        return graph


def test_two_hundred_frees_during_captures_break_none(cache: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, wrong, ended = Capturing(), list[Any](), threading.Event()

    def released(self: Captures) -> None:
        if program.capturing:
            wrong.append("memory was given back during a capture")

    monkeypatch.setattr(Captures, "released", released)

    def prompts() -> None:
        while not ended.is_set():
            with session(cache, program.owner):
                for side in (8, 8, 16, 16):
                    try:
                        if answer(cache.run(program, module.call(side))) != 2.0:
                            wrong.append(side)
                    except AssertionError as error:
                        wrong.append(error)

    thread = threading.Thread(target=prompts)
    thread.start()
    for _ in range(200):
        cache.trim()
        time.sleep(0)
    ended.set()
    thread.join()
    assert wrong == []
    assert cache.stats.counters.captures > 0
    cache.trim()
    assert (cache.bytes, program.open_graphs) == (0, 0)


# What the next process remembers.


class TestRemembering:
    @pytest.fixture
    def kept(self, tmp_path: Path) -> CacheConfig:
        return CacheConfig(budget_bytes=BUDGET, store_folder=tmp_path)

    def test_the_next_process_knows_what_was_called(self, kept: CacheConfig, program: Any, module: Module) -> None:
        cache = GraphCache(kept)
        for side in (8, 16, 8):
            cache.run(program, module.call(side))
        found = GraphCache(kept).shapes.of_model("model" * 8)
        assert [graph.key for graph in found] == [module.call(8).key, module.call(16).key]
        assert all(graph.seconds >= 0 for graph in found)

    def test_the_next_process_names_the_flag_of_torch_that_changed_meanwhile(
        self, kept: CacheConfig, program: Any, module: Module
    ) -> None:
        def texts(*flags: bool) -> list[str]:
            """Of a process in which the model is called under each of these settings."""
            cache = GraphCache(kept)
            for flag in flags:
                under = (("fp16 accumulation", flag), ("autocast", "off"))
                cache.run(FakeProgram(), module.call(8, torch_flags=under))
            return [event.text for event in cache.stats.events if event.kind == "signature"]

        since = "; since it last ran, torch's settings changed: fp16 accumulation"
        first = "unet 1x4x8x8: first graph of this module"
        assert texts(False) == [first]
        assert texts(False) == [first]
        assert texts(True) == [f"{first}{since} False -> True"]
        assert texts(True, False) == [first, "unet 1x4x8x8: fp16 accumulation True -> False"]
        assert texts(True) == [f"{first}{since} False -> True"]

    def test_calls_that_were_not_captured_because_of_a_patch_are_not(
        self, kept: CacheConfig, program: Any, module: Module
    ) -> None:
        cache = GraphCache(kept)
        cache.run(program, module.call(8, policy=ANYTHING.run_once(OBSERVED)))
        assert cache.shapes.models() == []

    def test_it_can_be_turned_off(self, kept: CacheConfig, program: Any, module: Module) -> None:
        cache = GraphCache(replace(kept, remember=False))
        cache.run(program, module.call(8))
        assert GraphCache(kept).shapes.models() == []
