"""GraphCache: what happens to one call after another."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from compile_cache.backends.base import Capabilities
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING
from compile_cache.config import CacheConfig

from ..fakes import BUDGET, GRADIENT, OBSERVED, FakeProgram, Module, Rig, answer, expect


class TestOneSignature:
    def test_the_first_sight_runs_and_captures_right_after(self, rig: Rig) -> None:
        with rig.expect(graph_calls=1, captures=1):
            assert rig.run() == 2.0
        assert rig.cache.bytes == rig.program.size

    def test_the_second_sight_replays_and_does_not_call_the_module(self, rig: Rig) -> None:
        rig.run()
        calls = rig.module.calls
        with rig.expect(replays=3):
            assert rig.run(times=3) == 2.0
        assert rig.module.calls == calls

    def test_a_replay_takes_the_inputs_of_its_own_call(self, rig: Rig) -> None:
        rig.run()
        assert rig.run(tensors=[torch.full((1, 4, 8, 8), 15.0)]) == 10.0

    def test_another_shape_is_another_capture_and_both_stay(self, rig: Rig) -> None:
        with rig.expect(graph_calls=2, captures=2, replays=2):
            for side in (8, 16, 8, 16):
                rig.run(side)
        assert rig.program.open_graphs == 2

    def test_each_capture_says_why_it_had_to_be(self, rig: Rig) -> None:
        for side in (8, 16):
            rig.run(side)
        texts = [event.text for event in rig.cache.stats.events if event.kind == "capture"]
        assert texts[0] == "1x4x8x8: first graph of this module"
        assert texts[1].startswith("1x4x16x16: latent ")

    def test_a_call_that_is_not_worth_a_capture_yet_gets_one_when_it_comes_again(self, rig: Rig) -> None:
        with rig.expect(graph_calls=2, captures=1, replays=1):
            rig.run(policy=ANYTHING.uncaptured())
            rig.run(why_captured="a tile of this size came again", times=2)
        (text,) = [event.text for event in rig.cache.stats.events if event.kind == "capture"]
        assert text == "1x4x8x8: a tile of this size came again"

    def test_another_module_of_the_same_structure_never_gets_this_ones_graph(self, rig: Rig) -> None:
        rig.run()
        other, other_program = Module(factor=5.0), FakeProgram(owner=2)
        with rig.expect(graph_calls=1, captures=1, replays=1):
            assert [answer(rig.cache.run(other_program, other.call())) for _ in range(2)] == [5.0, 5.0]

    def test_a_recheck_that_finds_no_change_is_made_once(self, rig: Rig) -> None:
        for counts in ({"captures": 1, "graph_calls": 1}, {"replays": 1}):
            call, rechecks = rig.module.call(), list[bool]()

            def unchanged(call: Any = call, rechecks: list[bool] = rechecks) -> Any:
                rechecks.append(True)
                return call

            with rig.expect(**counts):
                assert torch.equal(rig.cache.run(rig.program, call, unchanged), call.tensors[0] * 2)
            assert len(rechecks) == 1

    def test_a_call_that_the_recheck_changes_is_the_only_one_that_is_answered_counted_and_pinned(
        self, rig: Rig
    ) -> None:
        def changed() -> Any:
            rig.module.load(rig.module.factor + 1)
            return rig.module.call()

        for _ in range(2):  # before the first capture, and over one that is stale by then
            with rig.session():
                with rig.expect(captures=1, graph_calls=1):
                    result = rig.cache.run(rig.program, rig.module.call(), changed)
                assert answer(result) == rig.module.factor
                assert rig.cache.captured()[-1][0].epoch == rig.module.epoch
                assert rig.cache.trim() == 0
        assert rig.program.open_graphs == 1

    def test_with_captures_switched_off_every_call_runs_through_regions(self, program: Any, module: Any) -> None:
        cache = GraphCache(CacheConfig(capture=False))
        with expect(cache, graph_calls=2):
            for _ in range(2):
                assert answer(cache.run(program, module.call())) == 2.0

    def test_a_backend_that_neither_compiles_nor_captures_runs_the_original(self, cache: Any, module: Any) -> None:
        program = FakeProgram(capabilities=Capabilities(available=True))
        with expect(cache, eager_calls=2):
            for _ in range(2):
                assert answer(cache.run(program, module.call())) == 2.0


class TestWeightsThatMove:
    def test_a_new_epoch_never_replays_a_stale_capture(self, rig: Rig) -> None:
        rig.run()
        rig.module.load(7.0)
        with rig.expect(graph_calls=1, captures=1, replays=1):
            assert rig.run(times=2) == 7.0

    def test_a_new_epoch_drops_all_older_captures_of_the_module(self, rig: Rig) -> None:
        for side in (8, 16):
            rig.run(side)
        rig.module.load(7.0)
        rig.run(24)
        assert [graph.closed for graph in rig.program.graphs] == [1, 1, 0]
        assert rig.cache.bytes == rig.program.size

    def test_it_drops_them_though_a_session_pinned_them(self, rig: Rig) -> None:
        with rig.session():
            rig.run()
            rig.module.load(7.0)
            rig.run()
            assert [graph.closed for graph in rig.program.graphs] == [1, 0]
        assert rig.cache.trim() == rig.program.size

    def test_another_modules_captures_stay(self, rig: Rig) -> None:
        other, other_program = Module(factor=5.0), FakeProgram(owner=2)
        rig.cache.run(other_program, other.call())
        rig.run()
        rig.module.load(7.0)
        rig.run()
        assert other_program.open_graphs == 1


class TestBypasses:
    def test_a_bypassed_forward_runs_the_original_though_a_capture_is_there(self, rig: Rig) -> None:
        rig.run()
        with rig.expect({"gradient": 2}, eager_calls=2):
            rig.run(policy=ANYTHING.eager(GRADIENT), times=2)

    def test_a_blocked_capture_runs_through_regions_and_leaves_the_others_alone(self, rig: Rig) -> None:
        rig.run()
        with rig.expect({"observed_input": 1}, graph_calls=1, replays=1):
            rig.run(policy=ANYTHING.run_once(OBSERVED))
            rig.run()

    def test_a_reason_is_logged_once(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            rig.run(policy=ANYTHING.run_once(OBSERVED), times=3)
        assert sum(OBSERVED.detail in message for message in caplog.messages) == 1


class TestErrorsOfTheForward:
    @pytest.mark.parametrize("failure", [ValueError("bad latent"), RuntimeError("bad"), KeyboardInterrupt()], ids=repr)
    def test_they_propagate_unchanged_and_leave_the_cache_usable(self, rig: Rig, failure: BaseException) -> None:
        rig.module.failure = failure
        with rig.expect(), pytest.raises(type(failure)) as caught:  # not counted as answered
            rig.run()
        assert caught.value is failure
        rig.module.failure = None
        with rig.expect(graph_calls=1, captures=1, replays=1):
            assert rig.run(times=2) == 2.0


class TestReport:
    COUNTERS = {
        "region_compiles",
        "captures",
        "replays",
        "eager_calls",
        "bypasses",
        "evictions",
        "stall_seconds",
    }
    ENTRY = {"model", "role", "latent_shape", "size", "signature", "state", "bytes", "hits"}

    def test_it_holds_what_the_http_interface_promises(self, rig: Rig) -> None:
        assert rig.cache.report()["entries"] == []
        rig.run(times=3)
        rig.run(policy=ANYTHING.eager(GRADIENT))
        report = rig.cache.report()
        assert json.loads(json.dumps(report)) == report
        assert set(report) >= {"counters", "bytes", "budget_bytes", "entries"}
        assert set(report["counters"]) >= self.COUNTERS
        (entry,) = report["entries"]
        assert set(entry) >= self.ENTRY
        assert (report["bytes"], report["budget_bytes"]) == (rig.program.size, BUDGET)
        assert (entry["latent_shape"], entry["role"], entry["hits"]) == ([1, 4, 8, 8], "unet", 2)
        assert entry["bytes"] == rig.program.size
