"""GraphCache at its limits: captures that fail, memory that runs out, sessions, the budget, giving memory back."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from compile_cache.call_policy import ANYTHING
from compile_cache.errors import CaptureError, NoGainError, OverBudgetError

from ..fakes import BUDGET, GRADIENT, MIB, FakeProgram, Module, StoppingProgress, answer, expect, oom, session


class TestCapturesThatFail:
    @pytest.mark.parametrize(
        "failure", [CaptureError("illegal operation"), oom(), RuntimeError("CUDA error: illegal address")], ids=repr
    )
    def test_the_result_still_comes_and_it_is_not_tried_again(
        self, cache: Any, program: Any, module: Any, failure: Exception
    ) -> None:
        program.capture_failure = failure
        with expect(cache, {"capture_failed": 3}, graph_calls=3):
            for _ in range(3):
                assert answer(cache.run(program, module.call())) == 2.0
        assert program.capture_attempts == 1

    def test_the_reason_holds_the_cause(self, cache: Any, program: Any, module: Any) -> None:
        program.capture_failure = CaptureError("RuntimeError: operation not permitted")
        cache.run(program, module.call())
        assert "operation not permitted" in cache.stats.events[-1].text

    def test_other_shapes_are_still_captured(self, cache: Any, program: Any, module: Any) -> None:
        program.capture_failure = CaptureError("once")
        cache.run(program, module.call(8))
        program.capture_failure = None
        with expect(cache, graph_calls=1, captures=1, replays=1):
            for _ in range(2):
                cache.run(program, module.call(16))

    @pytest.mark.parametrize(
        ("failure", "change"),
        [
            (CaptureError("once"), "the weights moved"),
            (CaptureError("once"), "captures were freed"),
            (CaptureError("once"), "the module was forgotten"),
            (OverBudgetError(12 * MIB), "captures were freed"),
        ],
    )
    def test_it_is_tried_again_after(
        self, cache: Any, program: Any, module: Any, failure: CaptureError, change: str
    ) -> None:
        program.capture_failure = failure
        cache.run(program, module.call())
        program.capture_failure = None
        if change == "the weights moved":
            module.load(7.0)
        elif change == "captures were freed":
            cache.trim()
        else:
            cache.forget(program.owner)
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call())) == module.factor

    def test_a_cancel_before_the_capture_propagates_and_the_next_call_captures(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        progress = StoppingProgress()
        with pytest.raises(InterruptedError):
            cache.run(program, module.call(progress=progress))
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call(progress=progress))) == 2.0


class TestOutOfMemory:
    def test_captures_are_freed_and_the_shape_is_not_captured_from_then_on(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        cache.run(program, module.call(8))
        program.run_failures = [oom()]
        with expect(cache, {"out_of_memory": 1}, eager_calls=1):
            assert answer(cache.run(program, module.call(16))) == 2.0
        assert program.open_graphs == 0
        assert cache.bytes == 0
        assert cache.report()["counters"]["evictions"] == 1
        with expect(cache, {"out_of_memory": 2}, graph_calls=2):
            for _ in range(2):
                assert answer(cache.run(program, module.call(16))) == 2.0

    def test_with_nothing_to_free_it_propagates(self, cache: Any, program: Any, module: Any) -> None:
        program.run_failures = [oom()]
        with pytest.raises(torch.cuda.OutOfMemoryError):
            cache.run(program, module.call())
        assert module.calls == 0

    def test_a_second_failure_propagates(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        calls, program.run_failures, module.failure = module.calls, [oom()], torch.cuda.OutOfMemoryError("again")
        with pytest.raises(torch.cuda.OutOfMemoryError, match="again"):
            cache.run(program, module.call(16))
        assert module.calls == calls + 1

    # A failing graph launch raises the second, and ComfyUI's own `is_oom` takes it too.
    @pytest.mark.parametrize("error", [oom(), torch.AcceleratorError("CUDA error: out of memory")], ids=repr)
    @pytest.mark.parametrize("when", ["in a run", "in a replay", "in the original"])
    def test_captures_are_freed_and_the_original_runs(
        self, cache: Any, program: Any, module: Any, when: str, error: Exception
    ) -> None:
        counted: Any = expect(cache, {"out_of_memory": 1}, eager_calls=1)
        cache.run(program, module.call(8))
        call = module.call(8 if when == "in a replay" else 16)
        if when == "in a run":
            program.run_failures = [error]
        elif when == "in a replay":
            program.graphs[0].failure = error
        else:
            failures, counted = [error], contextlib.nullcontext()
            call = replace(
                call,
                policy=ANYTHING.eager(GRADIENT),
                invoke=lambda tensors: _raise(failures.pop()) if failures else module.forward(*tensors),
            )
        with counted:
            assert answer(cache.run(program, call)) == 2.0
        assert program.open_graphs == 0

    def test_another_error_of_the_driver_is_none(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        program.run_failures = [torch.AcceleratorError("CUDA error: an illegal memory access was encountered")]
        with pytest.raises(torch.AcceleratorError, match="illegal"):
            cache.run(program, module.call(16))


class TestAReplayThatFails:
    def test_costs_its_capture_and_no_picture(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        program.graphs[0].failure = RuntimeError("the launch failed")
        with expect(cache, {"capture_failed": 1}, eager_calls=1):
            assert answer(cache.run(program, module.call())) == 2.0
        assert program.open_graphs == 0

    def test_is_not_tried_again_until_the_weights_move(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        program.graphs[0].failure = RuntimeError("the launch failed")
        cache.run(program, module.call())
        with expect(cache, {"capture_failed": 1}, graph_calls=1):
            assert answer(cache.run(program, module.call())) == 2.0
        module.load(5.0)
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call())) == 5.0

    def test_in_the_middle_of_a_sampling_run_leaves_the_run_intact(self, cache: Any, program: Any, module: Any) -> None:
        with session(cache, program.owner):
            cache.run(program, module.call())
            program.graphs[0].failure = RuntimeError("the launch failed")
            assert answer(cache.run(program, module.call())) == 2.0
        assert program.open_graphs == 0


def _raise(error: BaseException) -> Any:
    raise error


class TestSessions:
    def test_what_a_session_uses_survives_trim_until_it_ends(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        with session(cache, program.owner):
            cache.run(program, module.call(16))
            assert cache.trim() == program.size
            assert [graph.closed for graph in program.graphs] == [1, 0]
        assert cache.trim() == program.size
        assert cache.bytes == 0

    def test_a_replay_pins_too(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        with session(cache, program.owner):
            cache.run(program, module.call())
            assert cache.trim() == 0

    def test_many_steps_of_one_shape_are_one_pin(self, cache: Any, program: Any, module: Any) -> None:
        with session(cache, program.owner):
            for _ in range(5):
                cache.run(program, module.call())
        assert cache.trim() == program.size

    def test_a_session_ends_with_an_error_too(self, cache: Any, program: Any, module: Any) -> None:
        with pytest.raises(ValueError, match="stop"), session(cache, program.owner):
            cache.run(program, module.call())
            raise ValueError("stop")
        assert cache.trim() == program.size

    def test_a_session_left_open_is_closed_by_the_next_one(self, cache: Any, program: Any, module: Any) -> None:
        cache.open_session(program.owner)
        cache.run(program, module.call(8))
        with session(cache, program.owner):
            assert cache.trim() == program.size

    def test_a_session_keeps_nothing_of_another_module(self, cache: Any, program: Any, module: Any) -> None:
        with session(cache, program.owner + 1):
            cache.run(program, module.call())
            assert cache.trim() == program.size

    def test_closing_a_session_that_is_not_open_does_nothing(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        cache.close_session(program.owner)
        assert cache.bytes == program.size


class TestBudget:
    def test_the_oldest_capture_goes_when_the_budget_is_full(self, cache: Any, program: Any, module: Any) -> None:
        for side in (8, 16, 24):
            cache.run(program, module.call(side))
        assert [graph.closed for graph in program.graphs] == [1, 0, 0]
        assert cache.bytes <= BUDGET
        assert cache.report()["counters"]["evictions"] == 1

    def test_a_shape_that_was_evicted_is_captured_again_and_says_so(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        for side in (8, 16, 24, 8):
            cache.run(program, module.call(side))
        assert program.capture_attempts == 4
        assert answer(cache.run(program, module.call(8))) == 2.0

    @pytest.mark.parametrize("refused", [False, True], ids=["made and too large", "refused by the backend"])
    def test_a_graph_over_the_budget_is_closed_and_not_tried_again_and_the_reason_names_both_sizes(
        self, cache: Any, program: Any, module: Any, refused: bool
    ) -> None:
        program.size = BUDGET + MIB
        program.capture_failure = OverBudgetError(11 * MIB) if refused else None
        with expect(cache, {"over_budget": 3}, graph_calls=3):
            for _ in range(3):
                assert answer(cache.run(program, module.call())) == 2.0
        assert program.capture_attempts == 1
        assert [graph.closed for graph in program.graphs] == ([] if refused else [1])
        assert cache.bytes == 0
        (reason,) = (event.text for event in cache.stats.events if event.kind == "bypass")
        assert "11 MiB" in reason
        assert "RESOLUTE_BUDGET_MB (now 10)" in reason

    def test_a_capture_is_made_with_the_peak_of_its_run_and_what_the_budget_leaves_as_its_limit(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        given = []
        program.capture = lambda call, result, memory: (
            given.append(memory) or FakeProgram.capture(program, call, result, memory)
        )
        cache.run(program, module.call())
        buffers = 2 * 1 * 4 * 8 * 8 * 4  # bytes of the input and of the output
        # The peak is not known on the CPU.
        assert [(memory.peak, memory.limit) for memory in given] == [(0, BUDGET - buffers)]

    def test_one_that_gains_nothing_is_tried_once_whatever_the_weights_and_is_no_bypass(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        program.capture_failure = NoGainError(0.25)
        with expect(cache, graph_calls=3):
            for _ in range(2):
                assert answer(cache.run(program, module.call())) == 2.0
            module.load(7.0)
            assert answer(cache.run(program, module.call())) == 7.0
        assert program.capture_attempts == 1
        program.capture_failure = None
        with expect(cache, graph_calls=1, captures=1):
            cache.run(program, module.call(16))
        cache.trim(1)  # memory for a model: that changes nothing about the gain
        with expect(cache, graph_calls=1):
            cache.run(program, module.call())
        cache.trim()  # the button Free: the GPU may have been busy with something else
        with expect(cache, graph_calls=1, captures=1, replays=1):
            for _ in range(2):
                cache.run(program, module.call())

    def test_what_a_session_uses_is_not_evicted_for_more(self, cache: Any, program: Any, module: Any) -> None:
        with session(cache, program.owner):
            for side in (8, 16, 24):
                cache.run(program, module.call(side))
            assert [graph.closed for graph in program.graphs] == [0, 0, 1]
            with expect(cache, replays=2):
                for side in (8, 16):
                    cache.run(program, module.call(side))


class TestGivingBack:
    def test_trim_frees_only_as_much_as_was_asked_for(self, cache: Any, program: Any, module: Any) -> None:
        for side in (8, 16):
            cache.run(program, module.call(side))
        assert cache.trim(1) == program.size
        assert [graph.closed for graph in program.graphs] == [1, 0]

    def test_after_trim_a_shape_is_captured_again(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        cache.trim()
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call())) == 2.0

    def test_forget_closes_everything_of_one_module_even_in_a_session(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        other_program = FakeProgram(owner=2)
        cache.run(other_program, Module().call())
        cache.open_session(program.owner)
        cache.run(program, module.call())
        cache.forget(program.owner)
        assert (program.open_graphs, other_program.open_graphs) == (0, 1)
        assert [graph.closed for graph in program.graphs] == [1]
