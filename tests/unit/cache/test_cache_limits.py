"""GraphCache at its limits: captures that fail, memory that runs out, sessions, the budget, giving memory back."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from compile_cache.call_policy import ANYTHING
from compile_cache.errors import CaptureError, NoGainError, OverBudgetError

from ..fakes import BUDGET, GRADIENT, MIB, FakeProgram, Module, Rig, StoppingProgress, answer, expect, oom, session


class TestCapturesThatFail:
    @pytest.mark.parametrize(
        "failure", [CaptureError("illegal operation"), oom(), RuntimeError("CUDA error: illegal address")], ids=repr
    )
    def test_the_result_still_comes_and_it_is_not_tried_again(self, rig: Rig, failure: Exception) -> None:
        rig.program.capture_failure = failure
        with rig.expect({"capture_failed": 3}, graph_calls=3):
            assert rig.run(times=3) == 2.0
        assert rig.program.capture_attempts == 1

    def test_the_reason_holds_the_cause(self, rig: Rig) -> None:
        rig.program.capture_failure = CaptureError("RuntimeError: operation not permitted")
        rig.run()
        assert "operation not permitted" in rig.cache.stats.events[-1].text

    def test_other_shapes_are_still_captured(self, rig: Rig) -> None:
        rig.program.capture_failure = CaptureError("once")
        rig.run(8)
        rig.program.capture_failure = None
        with rig.expect(graph_calls=1, captures=1, replays=1):
            rig.run(16, times=2)

    @pytest.mark.parametrize(
        ("failure", "change"),
        [
            (CaptureError("once"), "the weights moved"),
            (CaptureError("once"), "captures were freed"),
            (CaptureError("once"), "the module was forgotten"),
            (OverBudgetError(12 * MIB), "captures were freed"),
        ],
    )
    def test_it_is_tried_again_after(self, rig: Rig, failure: CaptureError, change: str) -> None:
        rig.program.capture_failure = failure
        rig.run()
        rig.program.capture_failure = None
        if change == "the weights moved":
            rig.module.load(7.0)
        elif change == "captures were freed":
            rig.cache.trim()
        else:
            rig.cache.forget(rig.program.owner)
        with rig.expect(graph_calls=1, captures=1):
            assert rig.run() == rig.module.factor

    def test_a_cancel_before_the_capture_propagates_and_the_next_call_captures(self, rig: Rig) -> None:
        progress = StoppingProgress()
        with pytest.raises(InterruptedError):
            rig.run(progress=progress)
        with rig.expect(graph_calls=1, captures=1):
            assert rig.run(progress=progress) == 2.0


class TestOutOfMemory:
    def test_captures_are_freed_and_the_shape_is_not_captured_from_then_on(self, rig: Rig) -> None:
        rig.run(8)
        rig.program.run_failures = [oom()]
        with rig.expect({"out_of_memory": 1}, eager_calls=1):
            assert rig.run(16) == 2.0
        assert rig.program.open_graphs == 0
        assert rig.cache.bytes == 0
        assert rig.cache.report()["counters"]["evictions"] == 1
        with rig.expect({"out_of_memory": 2}, graph_calls=2):
            assert rig.run(16, times=2) == 2.0

    def test_with_nothing_to_free_it_propagates(self, rig: Rig) -> None:
        rig.program.run_failures = [oom()]
        with pytest.raises(torch.cuda.OutOfMemoryError):
            rig.run()
        assert rig.module.calls == 0

    def test_a_second_failure_propagates(self, rig: Rig) -> None:
        rig.run(8)
        calls, rig.program.run_failures, rig.module.failure = (
            rig.module.calls,
            [oom()],
            torch.cuda.OutOfMemoryError("again"),
        )
        with pytest.raises(torch.cuda.OutOfMemoryError, match="again"):
            rig.run(16)
        assert rig.module.calls == calls + 1

    # A failing graph launch raises the second, and ComfyUI's own `is_oom` takes it too.
    @pytest.mark.parametrize("error", [oom(), torch.AcceleratorError("CUDA error: out of memory")], ids=repr)
    @pytest.mark.parametrize("when", ["in a run", "in a replay", "in the original"])
    def test_captures_are_freed_and_the_original_runs(self, rig: Rig, when: str, error: Exception) -> None:
        counted: Any = expect(rig.cache, {"out_of_memory": 1}, eager_calls=1)
        rig.run(8)
        call = rig.module.call(8 if when == "in a replay" else 16)
        if when == "in a run":
            rig.program.run_failures = [error]
        elif when == "in a replay":
            rig.program.graphs[0].failure = error
        else:
            failures, counted = [error], contextlib.nullcontext()
            call = replace(
                call,
                policy=ANYTHING.eager(GRADIENT),
                invoke=lambda tensors: _raise(failures.pop()) if failures else rig.module.forward(*tensors),
            )
        with counted:
            assert answer(rig.cache.run(rig.program, call)) == 2.0
        assert rig.program.open_graphs == 0

    def test_another_error_of_the_driver_is_none(self, rig: Rig) -> None:
        rig.run(8)
        rig.program.run_failures = [torch.AcceleratorError("CUDA error: an illegal memory access was encountered")]
        with pytest.raises(torch.AcceleratorError, match="illegal"):
            rig.run(16)


class TestAReplayThatFails:
    def test_costs_its_capture_and_no_picture(self, rig: Rig) -> None:
        rig.run()
        rig.program.graphs[0].failure = RuntimeError("the launch failed")
        with rig.expect({"capture_failed": 1}, eager_calls=1):
            assert rig.run() == 2.0
        assert rig.program.open_graphs == 0

    def test_is_not_tried_again_until_the_weights_move(self, rig: Rig) -> None:
        rig.run()
        rig.program.graphs[0].failure = RuntimeError("the launch failed")
        rig.run()
        with rig.expect({"capture_failed": 1}, graph_calls=1):
            assert rig.run() == 2.0
        rig.module.load(5.0)
        with rig.expect(graph_calls=1, captures=1):
            assert rig.run() == 5.0

    def test_in_the_middle_of_a_sampling_run_leaves_the_run_intact(self, rig: Rig) -> None:
        with rig.session():
            rig.run()
            rig.program.graphs[0].failure = RuntimeError("the launch failed")
            assert rig.run() == 2.0
        assert rig.program.open_graphs == 0


def _raise(error: BaseException) -> Any:
    raise error


class TestSessions:
    def test_what_a_session_uses_survives_trim_until_it_ends(self, rig: Rig) -> None:
        rig.run(8)
        with rig.session():
            rig.run(16)
            assert rig.cache.trim() == rig.program.size
            assert [graph.closed for graph in rig.program.graphs] == [1, 0]
        assert rig.cache.trim() == rig.program.size
        assert rig.cache.bytes == 0

    def test_a_replay_pins_too(self, rig: Rig) -> None:
        rig.run()
        with rig.session():
            rig.run()
            assert rig.cache.trim() == 0

    def test_many_steps_of_one_shape_are_one_pin(self, rig: Rig) -> None:
        with rig.session():
            rig.run(times=5)
        assert rig.cache.trim() == rig.program.size

    def test_a_session_ends_with_an_error_too(self, rig: Rig) -> None:
        with pytest.raises(ValueError, match="stop"), session(rig.cache, rig.program.owner):
            rig.run()
            raise ValueError("stop")
        assert rig.cache.trim() == rig.program.size

    def test_a_session_left_open_is_closed_by_the_next_one(self, rig: Rig) -> None:
        rig.cache.open_session(rig.program.owner)
        rig.run(8)
        with rig.session():
            assert rig.cache.trim() == rig.program.size

    def test_a_session_keeps_nothing_of_another_module(self, rig: Rig) -> None:
        with session(rig.cache, rig.program.owner + 1):
            rig.run()
            assert rig.cache.trim() == rig.program.size

    def test_closing_a_session_that_is_not_open_does_nothing(self, rig: Rig) -> None:
        rig.run()
        rig.cache.close_session(rig.program.owner)
        assert rig.cache.bytes == rig.program.size


class TestBudget:
    def test_the_oldest_capture_goes_when_the_budget_is_full(self, rig: Rig) -> None:
        for side in (8, 16, 24):
            rig.run(side)
        assert [graph.closed for graph in rig.program.graphs] == [1, 0, 0]
        assert rig.cache.bytes <= BUDGET
        assert rig.cache.report()["counters"]["evictions"] == 1

    def test_a_shape_that_was_evicted_is_captured_again_and_says_so(self, rig: Rig) -> None:
        for side in (8, 16, 24, 8):
            rig.run(side)
        assert rig.program.capture_attempts == 4
        assert rig.run(8) == 2.0

    @pytest.mark.parametrize("refused", [False, True], ids=["made and too large", "refused by the backend"])
    def test_a_graph_over_the_budget_is_closed_and_not_tried_again_and_the_reason_names_both_sizes(
        self, rig: Rig, refused: bool
    ) -> None:
        rig.program.size = BUDGET + MIB
        rig.program.capture_failure = OverBudgetError(11 * MIB) if refused else None
        with rig.expect({"over_budget": 3}, graph_calls=3):
            assert rig.run(times=3) == 2.0
        assert rig.program.capture_attempts == 1
        assert [graph.closed for graph in rig.program.graphs] == ([] if refused else [1])
        assert rig.cache.bytes == 0
        (reason,) = (event.text for event in rig.cache.stats.events if event.kind == "bypass")
        assert "11 MiB" in reason
        assert "RESOLUTE_BUDGET_MB (now 10)" in reason

    def test_a_capture_is_made_with_the_peak_of_its_run_and_what_the_budget_leaves_as_its_limit(self, rig: Rig) -> None:
        given = []
        rig.program.capture = lambda call, result, memory: (
            given.append(memory) or FakeProgram.capture(rig.program, call, result, memory)
        )
        rig.run()
        buffers = 2 * 1 * 4 * 8 * 8 * 4  # bytes of the input and of the output
        # The peak is not known on the CPU.
        assert [(memory.peak, memory.limit) for memory in given] == [(0, BUDGET - buffers)]

    def test_one_that_gains_nothing_is_tried_once_whatever_the_weights_and_is_no_bypass(self, rig: Rig) -> None:
        rig.program.capture_failure = NoGainError(0.25)
        with rig.expect(graph_calls=3):
            assert rig.run(times=2) == 2.0
            rig.module.load(7.0)
            assert rig.run() == 7.0
        assert rig.program.capture_attempts == 1
        rig.program.capture_failure = None
        with rig.expect(graph_calls=1, captures=1):
            rig.run(16)
        rig.cache.trim(1)  # memory for a model: that changes nothing about the gain
        with rig.expect(graph_calls=1):
            rig.run()
        rig.cache.trim()  # the button Free: the GPU may have been busy with something else
        with rig.expect(graph_calls=1, captures=1, replays=1):
            rig.run(times=2)

    def test_what_a_session_uses_is_not_evicted_for_more(self, rig: Rig) -> None:
        with rig.session():
            for side in (8, 16, 24):
                rig.run(side)
            assert [graph.closed for graph in rig.program.graphs] == [0, 0, 1]
            with rig.expect(replays=2):
                for side in (8, 16):
                    rig.run(side)


class TestGivingBack:
    def test_trim_frees_only_as_much_as_was_asked_for(self, rig: Rig) -> None:
        for side in (8, 16):
            rig.run(side)
        assert rig.cache.trim(1) == rig.program.size
        assert [graph.closed for graph in rig.program.graphs] == [1, 0]

    def test_after_trim_a_shape_is_captured_again(self, rig: Rig) -> None:
        rig.run()
        rig.cache.trim()
        with rig.expect(graph_calls=1, captures=1):
            assert rig.run() == 2.0

    def test_forget_closes_everything_of_one_module_even_in_a_session(self, rig: Rig) -> None:
        other_program = FakeProgram(owner=2)
        rig.cache.run(other_program, Module().call())
        rig.cache.open_session(rig.program.owner)
        rig.run()
        rig.cache.forget(rig.program.owner)
        assert (rig.program.open_graphs, other_program.open_graphs) == (0, 1)
        assert [graph.closed for graph in rig.program.graphs] == [1]
