"""GraphCache: one call after another through a program and graphs that only pretend, on small CPU tensors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from compile_cache.backends.base import Call, Capabilities, Program
from compile_cache.cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.errors import BypassCode, BypassReason, CaptureError
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec

MIB = 1024 * 1024
BUDGET = 10 * MIB
FULL = Capabilities(available=True, compiles=True, captures=True)
COUNTED = ("captures", "replays", "graph_calls", "eager_calls")


def oom() -> Exception:
    return torch.cuda.OutOfMemoryError("out of memory")


class FakeGraph:
    """Answers like the module did when it was captured, so that a stale one gives itself away."""

    def __init__(self, forward: Callable[..., Any], size: int) -> None:
        self.bytes = size
        self.closed = 0
        self.failure: BaseException | None = None
        self._forward = forward

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        assert not self.closed, "a closed graph was replayed"
        if self.failure is not None:
            raise self.failure
        return self._forward(*tensors)

    def close(self) -> None:
        self.closed += 1


@dataclass(eq=False)
class Module:
    """A forward that multiplies; `factor` plays the weights, `epoch` their residency."""

    factor: float = 2.0
    epoch: int = 1
    failure: BaseException | None = None
    calls: int = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return x * self.factor

    def load(self, factor: float) -> None:
        """New weights at new addresses."""
        self.factor, self.epoch = factor, self.epoch + 1

    def call(self, side: int = 8, **changes: Any) -> Call:
        signature = Signature((("latent", TensorSpec((1, 4, side, side), "float32", "cpu")),))
        call = Call(
            key=GraphKey(signature, Role.UNET, "model" * 8, "fake"),
            tensors=[torch.full((1, 4, side, side), 3.0)],
            invoke=lambda tensors: self.forward(*tensors),
            device="cpu",
            epoch=self.epoch,
        )
        return replace(call, **changes)


class FakeProgram(Program):
    def __init__(self, owner: int = 1, capabilities: Capabilities = FULL, size: int = 4 * MIB) -> None:
        super().__init__(owner, capabilities)
        self.size = size
        self.graphs: list[FakeGraph] = []
        self.run_failures: list[BaseException] = []
        self.capture_failure: BaseException | None = None
        self.capture_attempts = 0

    def run(self, call: Call) -> Any:
        if self.run_failures:
            raise self.run_failures.pop(0)
        return call.invoke(call.tensors)

    def capture(self, call: Call, result: Any) -> FakeGraph:
        self.capture_attempts += 1
        assert torch.equal(result, call.invoke(call.tensors)), "the result of the run that came right before"
        if self.capture_failure is not None:
            raise self.capture_failure
        factor = float(call.invoke([torch.ones(1)]))
        graph = FakeGraph(lambda x: x * factor, self.size)
        self.graphs.append(graph)
        return graph

    @property
    def open_graphs(self) -> int:
        return sum(not graph.closed for graph in self.graphs)


@dataclass
class StoppingMonitor:
    """Somebody presses Cancel."""

    presses: Iterator[bool] = field(default_factory=lambda: itertools.chain([True], itertools.repeat(False)))

    def checkpoint(self) -> None:
        if next(self.presses):
            raise InterruptedError("cancelled")

    def progress(self, done: int, total: int, text: str) -> None: ...


@pytest.fixture
def cache() -> GraphCache:
    return GraphCache(CacheConfig(budget_bytes=BUDGET))


@pytest.fixture
def module() -> Module:
    return Module()


@pytest.fixture
def program() -> FakeProgram:
    return FakeProgram()


@contextmanager
def expect(cache: GraphCache, bypasses: dict[str, int] | None = None, **counts: int) -> Iterator[None]:
    """Exactly these counts are added in the block: a counter that is not named stays, and so do the bypasses."""
    before = cache.stats.snapshot()
    yield
    after = cache.stats.snapshot()
    assert {name: after[name] - before[name] for name in COUNTED} == {name: counts.get(name, 0) for name in COUNTED}
    added = {code: n - before["bypasses"].get(code, 0) for code, n in after["bypasses"].items()}
    assert {code: n for code, n in added.items() if n} == (bypasses or {})


def answer(result: torch.Tensor) -> float:
    """The factor that the result was made with."""
    return float(result.flatten()[0]) / 3.0


class TestOneSignature:
    def test_the_first_sight_runs_and_captures_right_after(self, cache: Any, program: Any, module: Any) -> None:
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call())) == 2.0
        assert cache.bytes == program.size

    def test_the_second_sight_replays_and_does_not_call_the_module(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        calls = module.calls
        with expect(cache, replays=3):
            assert [answer(cache.run(program, module.call())) for _ in range(3)] == [2.0] * 3
        assert module.calls == calls

    def test_a_replay_takes_the_inputs_of_its_own_call(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        assert answer(cache.run(program, module.call(tensors=[torch.full((1, 4, 8, 8), 15.0)]))) == 10.0

    def test_another_shape_is_another_capture_and_both_stay(self, cache: Any, program: Any, module: Any) -> None:
        with expect(cache, graph_calls=2, captures=2, replays=2):
            for side in (8, 16, 8, 16):
                cache.run(program, module.call(side))
        assert program.open_graphs == 2

    def test_each_capture_says_why_it_had_to_be(self, cache: Any, program: Any, module: Any) -> None:
        for side in (8, 16):
            cache.run(program, module.call(side))
        texts = [event.text for event in cache.stats.events if event.kind == "capture"]
        assert texts[0] == "1x4x8x8: first graph of this module"
        assert texts[1].startswith("1x4x16x16: latent ")

    def test_another_module_of_the_same_structure_never_gets_this_ones_graph(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        cache.run(program, module.call())
        other, other_program = Module(factor=5.0), FakeProgram(owner=2)
        with expect(cache, graph_calls=1, captures=1, replays=1):
            assert [answer(cache.run(other_program, other.call())) for _ in range(2)] == [5.0, 5.0]

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
    def test_a_new_epoch_never_replays_a_stale_capture(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        module.load(7.0)
        with expect(cache, graph_calls=1, captures=1, replays=1):
            assert [answer(cache.run(program, module.call())) for _ in range(2)] == [7.0, 7.0]

    def test_a_new_epoch_drops_all_older_captures_of_the_module(self, cache: Any, program: Any, module: Any) -> None:
        for side in (8, 16):
            cache.run(program, module.call(side))
        module.load(7.0)
        cache.run(program, module.call(24))
        assert [graph.closed for graph in program.graphs] == [1, 1, 0]
        assert cache.bytes == program.size

    def test_it_drops_them_though_a_session_pinned_them(self, cache: Any, program: Any, module: Any) -> None:
        with cache.session(program.owner):
            cache.run(program, module.call())
            module.load(7.0)
            cache.run(program, module.call())
            assert [graph.closed for graph in program.graphs] == [1, 0]
        assert cache.trim() == program.size

    def test_another_modules_captures_stay(self, cache: Any, program: Any, module: Any) -> None:
        other, other_program = Module(factor=5.0), FakeProgram(owner=2)
        cache.run(other_program, other.call())
        cache.run(program, module.call())
        module.load(7.0)
        cache.run(program, module.call())
        assert other_program.open_graphs == 1

    def test_the_new_capture_says_that_the_weights_moved(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        module.load(7.0)
        cache.run(program, module.call())
        assert cache.stats.events[-1].text.endswith("weights epoch 1 -> 2")


class TestBypasses:
    GRADIENT = BypassReason(BypassCode.GRADIENT, "gradients are on")
    OBSERVED = BypassReason(BypassCode.OBSERVED_INPUT, "another node patches the model")

    def test_a_bypassed_forward_runs_the_original_though_a_capture_is_there(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        cache.run(program, module.call())
        with expect(cache, {"gradient": 2}, eager_calls=2):
            for _ in range(2):
                cache.run(program, module.call(forward_bypass=self.GRADIENT))

    def test_a_blocked_capture_runs_through_regions_and_leaves_the_others_alone(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        cache.run(program, module.call())
        with expect(cache, {"observed_input": 1}, graph_calls=1, replays=1):
            cache.run(program, module.call(capture_blocker=self.OBSERVED))
            cache.run(program, module.call())

    def test_a_reason_is_logged_once(
        self, cache: Any, program: Any, module: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO"):
            for _ in range(3):
                cache.run(program, module.call(capture_blocker=self.OBSERVED))
        assert sum(self.OBSERVED.detail in message for message in caplog.messages) == 1


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

    def test_weights_that_moved_are_a_reason_to_try_again(self, cache: Any, program: Any, module: Any) -> None:
        program.capture_failure = CaptureError("once")
        cache.run(program, module.call())
        program.capture_failure = None
        module.load(7.0)
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call())) == 7.0

    def test_freed_memory_is_a_reason_to_try_again(self, cache: Any, program: Any, module: Any) -> None:
        program.capture_failure = CaptureError("once")
        cache.run(program, module.call())
        program.capture_failure = None
        cache.trim()
        with expect(cache, graph_calls=1, captures=1):
            cache.run(program, module.call())

    def test_a_cancel_before_the_capture_propagates_and_the_next_call_captures(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        monitor = StoppingMonitor()
        with pytest.raises(InterruptedError):
            cache.run(program, module.call(monitor=monitor))
        with expect(cache, graph_calls=1, captures=1):
            assert answer(cache.run(program, module.call(monitor=monitor))) == 2.0


class TestOutOfMemory:
    def test_captures_are_freed_and_the_call_is_answered_once_more(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        program.run_failures = [oom()]
        with expect(cache, {"out_of_memory": 1}, eager_calls=1):
            assert answer(cache.run(program, module.call(16))) == 2.0
        assert program.open_graphs == 0
        assert cache.bytes == 0

    def test_the_shape_is_not_captured_from_then_on(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        program.run_failures = [oom()]
        cache.run(program, module.call(16))
        with expect(cache, {"out_of_memory": 2}, graph_calls=2):
            for _ in range(2):
                assert answer(cache.run(program, module.call(16))) == 2.0

    def test_freed_captures_count_as_evictions_in_the_report(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        program.run_failures = [oom()]
        cache.run(program, module.call(16))
        assert cache.report()["counters"]["evictions"] == 1

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

    def test_in_a_replay_it_frees_captures_and_runs_the_original(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        program.graphs[0].failure = oom()
        with expect(cache, {"out_of_memory": 1}, eager_calls=1):
            assert answer(cache.run(program, module.call())) == 2.0
        assert program.open_graphs == 0

    def test_in_the_original_it_frees_captures_and_runs_once_more(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        failures = [oom()]

        def forward(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            if failures:
                raise failures.pop()
            return module.forward(*tensors)

        call = module.call(16, invoke=forward, forward_bypass=TestBypasses.GRADIENT)
        assert answer(cache.run(program, call)) == 2.0
        assert program.open_graphs == 0


class TestErrorsOfTheForward:
    @pytest.mark.parametrize("failure", [ValueError("bad latent"), RuntimeError("bad"), KeyboardInterrupt()], ids=repr)
    def test_they_propagate_unchanged_and_leave_the_cache_usable(
        self, cache: Any, program: Any, module: Any, failure: BaseException
    ) -> None:
        module.failure = failure
        with pytest.raises(type(failure)) as caught:
            cache.run(program, module.call())
        assert caught.value is failure
        module.failure = None
        with expect(cache, graph_calls=1, captures=1, replays=1):
            for _ in range(2):
                assert answer(cache.run(program, module.call())) == 2.0

    def test_a_failed_call_is_not_counted_as_answered(self, cache: Any, program: Any, module: Any) -> None:
        module.failure = ValueError("bad latent")
        with expect(cache), pytest.raises(ValueError, match="bad latent"):
            cache.run(program, module.call())


class TestSessions:
    def test_what_a_session_uses_survives_trim_until_it_ends(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(8))
        with cache.session(program.owner):
            cache.run(program, module.call(16))
            assert cache.trim() == program.size
            assert [graph.closed for graph in program.graphs] == [1, 0]
        assert cache.trim() == program.size
        assert cache.bytes == 0

    def test_a_replay_pins_too(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        with cache.session(program.owner):
            cache.run(program, module.call())
            assert cache.trim() == 0

    def test_many_steps_of_one_shape_are_one_pin(self, cache: Any, program: Any, module: Any) -> None:
        with cache.session(program.owner):
            for _ in range(5):
                cache.run(program, module.call())
        assert cache.trim() == program.size

    def test_a_session_ends_with_an_error_too(self, cache: Any, program: Any, module: Any) -> None:
        with pytest.raises(ValueError, match="stop"), cache.session(program.owner):
            cache.run(program, module.call())
            raise ValueError("stop")
        assert cache.trim() == program.size

    def test_a_session_left_open_is_closed_by_the_next_one(self, cache: Any, program: Any, module: Any) -> None:
        cache.open_session(program.owner)
        cache.run(program, module.call(8))
        with cache.session(program.owner):
            assert cache.trim() == program.size

    def test_a_session_keeps_nothing_of_another_module(self, cache: Any, program: Any, module: Any) -> None:
        with cache.session(program.owner + 1):
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

    def test_a_graph_over_the_budget_is_closed_and_the_reason_names_the_setting(
        self, cache: Any, program: Any, module: Any
    ) -> None:
        program.size = BUDGET + MIB
        with expect(cache, {"out_of_memory": 3}, graph_calls=3, captures=1):
            for _ in range(3):
                assert answer(cache.run(program, module.call())) == 2.0
        assert [graph.closed for graph in program.graphs] == [1]
        assert cache.bytes == 0
        (reason,) = (event.text for event in cache.stats.events if event.kind == "bypass")
        assert "11 MiB" in reason
        assert "RESOLUTE_BUDGET_MB (now 10)" in reason

    def test_what_a_session_uses_is_not_evicted_for_more(self, cache: Any, program: Any, module: Any) -> None:
        with cache.session(program.owner):
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

    def test_forget_lets_go_of_latched_reasons(self, cache: Any, program: Any, module: Any) -> None:
        program.capture_failure = CaptureError("once")
        cache.run(program, module.call())
        program.capture_failure = None
        cache.forget(program.owner)
        with expect(cache, graph_calls=1, captures=1):
            cache.run(program, module.call())


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
    ENTRY = {"model", "role", "latent_shape", "signature", "state", "bytes", "hits"}

    def test_it_holds_what_the_http_interface_promises(self, cache: Any, program: Any, module: Any) -> None:
        for _ in range(3):
            cache.run(program, module.call())
        report = cache.report()
        assert set(report) >= {"counters", "bytes", "budget_bytes", "entries"}
        assert set(report["counters"]) >= self.COUNTERS
        (entry,) = report["entries"]
        assert set(entry) >= self.ENTRY
        assert (report["bytes"], report["budget_bytes"]) == (program.size, BUDGET)
        assert (entry["latent_shape"], entry["role"], entry["hits"]) == ([1, 4, 8, 8], "unet", 2)
        assert entry["bytes"] == program.size

    def test_it_is_plain_data(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call(forward_bypass=TestBypasses.GRADIENT))
        cache.run(program, module.call())
        report = cache.report()
        assert json.loads(json.dumps(report)) == report

    def test_an_empty_cache_has_a_report(self, cache: Any) -> None:
        report = cache.report()
        assert report["entries"] == []
        assert report["counters"]["bypasses"] == {}

    def test_the_time_of_a_capture_counts_as_a_stall(self, cache: Any, program: Any, module: Any) -> None:
        cache.run(program, module.call())
        assert cache.report()["counters"]["stall_seconds"] > 0
        assert [event.kind for event in cache.stats.events] == ["capture"]
