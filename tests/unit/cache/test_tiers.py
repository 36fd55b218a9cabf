"""Two tiers of captures: originals are captured at once, and compiled code after them where a sampling run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.base import Call, CaptureFacts, Code
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING, Runs
from compile_cache.config import CacheConfig
from compile_cache.errors import CaptureError, NoGainError
from compile_cache.keys import COMPILED_NOW as COMPILED
from compile_cache.keys import Tier

from ..fakes import BUDGET, GRADIENT, FakeGraph, FakeProgram, Module, answer, expect, session


class Tiered(FakeProgram):
    """Its compiled code multiplies by 10 more, so that each result tells what ran."""

    def run(self, call: Call) -> Any:
        result = super().run(call)
        return result if self.ran_originals or call.policy.runs is Runs.ORIGINALS else result + 30.0

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> FakeGraph:
        self.capture_attempts += 1
        if self.capture_failure is not None:
            raise self.capture_failure
        factor = float((result / call.tensors[0]).flatten()[0])
        graph = FakeGraph(lambda x: x * factor, self.size)
        self.graphs.append(graph)
        return graph


ORIGINAL_RAN, COMPILED_RAN = 2.0, 12.0


class Rig:
    """Calls of one module that wait for nothing."""

    def __init__(self, **config: Any) -> None:
        self.cache = GraphCache(CacheConfig(budget_bytes=BUDGET, **config))
        self.program, self.module = Tiered(), Module()
        self.program.code = Code.MISSING

    def call(self, begins_run: bool = False, **changes: Any) -> float:
        changes = {"background_compile": True, "begins_run": begins_run, **changes}
        return answer(self.cache.run(self.program, self.module.call(**changes)))

    def run(self, steps: int = 3, **changes: Any) -> list[float]:
        """A sampling run."""
        with session(self.cache, self.program.owner):
            return [self.call(begins_run=step == 0, **changes) for step in range(steps)]

    @property
    def tiers(self) -> list[Tier]:
        return [key.tier for key, _ in self.cache.captured()]

    @property
    def whys(self) -> list[str]:
        return [event.text.partition(": ")[2] for event in self.cache.stats.events if event.kind == "capture"]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_originals_are_captured_at_once_and_their_replays_are_counted(rig: Rig) -> None:
    with expect(rig.cache, captures=1, eager_calls=1, replays=4):
        assert rig.run(5) == [ORIGINAL_RAN] * 5
    counters = rig.cache.stats.counters
    assert (counters.waiting_calls, counters.original_replays, counters.signatures) == (1, 4, 1)
    assert rig.tiers == [Tier.ORIGINAL]


@pytest.mark.parametrize(("code", "tier"), [(Code.MISSING, Tier.ORIGINAL), (Code.READY, Tier.COMPILED)])
def test_what_another_program_captured_is_replayed_until_this_one_has_its_code(
    rig: Rig, code: Code, tier: Tier
) -> None:
    """While a backend is imported, another program stands in. The first call of the next run shows what is lacking."""
    rig.run()
    rig.program = Tiered()
    rig.program.code = code
    assert rig.call() == ORIGINAL_RAN, "never between two steps"
    ran = ORIGINAL_RAN if code is Code.MISSING else COMPILED_RAN
    first = {"eager_calls": 1} if code is Code.MISSING else {"captures": 1, "graph_calls": 1}
    with expect(rig.cache, **first, replays=2):
        assert rig.run(3) == [ran] * 3
    assert rig.tiers == [tier]


def test_compiled_code_replaces_them_where_a_sampling_run_begins_and_never_between_two_steps(rig: Rig) -> None:
    rig.run()
    with session(rig.cache, rig.program.owner):
        rig.call(begins_run=True)
        rig.program.code = Code.READY
        with expect(rig.cache, replays=3):
            assert [rig.call() for _ in range(3)] == [ORIGINAL_RAN] * 3
    originals = rig.cache.stats.counters.original_replays
    with expect(rig.cache, captures=1, graph_calls=1, replays=2):
        assert rig.run() == [COMPILED_RAN] * 3
    assert (rig.tiers, rig.cache.stats.counters.original_replays) == ([Tier.COMPILED], originals)
    assert rig.whys == ["first graph of this module", COMPILED]
    assert (rig.program.open_graphs, rig.cache.stats.counters.evictions) == (1, 0), "a swap is no eviction"


def test_each_signature_is_swapped_by_itself_and_another_module_by_its_own_run(rig: Rig) -> None:
    other, other_module = Tiered(owner=2), Module()
    other.size = rig.program.size = 1
    other.code = Code.MISSING
    rig.cache.run(other, other_module.call(background_compile=True, begins_run=True))
    rig.run(side=8)
    rig.run(side=16)
    rig.program.code = other.code = Code.READY
    rig.run(side=8)
    assert sorted((key.owner, key.shape, int(key.tier)) for key, _ in rig.cache.captured()) == [
        (1, "1x4x8x8", 2), (2, "1x4x8x8", 1),
    ], "the other size is captured anew when it comes"  # fmt: skip
    rig.run(side=16)
    assert rig.whys[-2:] == [COMPILED, COMPILED]
    assert not other.graphs[0].closed


def test_a_call_outside_of_sampling_runs_begins_one_each_time(rig: Rig) -> None:
    assert rig.call(begins_run=True) == ORIGINAL_RAN
    rig.program.code = Code.READY
    with expect(rig.cache, captures=1, graph_calls=1):
        assert rig.call(begins_run=True) == COMPILED_RAN


def test_code_that_came_costs_one_call_of_each_run_which_compares_it(rig: Rig) -> None:
    rig.run()
    rig.program.code = Code.UNVERIFIED
    for number in (1, 2):
        with expect(rig.cache, eager_calls=1, replays=2):
            assert rig.run() == [ORIGINAL_RAN] * 3
        assert rig.program.comparisons == number
    counters = rig.cache.stats.counters
    assert (counters.waiting_calls, counters.signatures, counters.captures) == (3, 1, 1)
    assert not [event for event in rig.cache.stats.events if "evicted" in event.text], "nothing was freed"


def test_a_call_that_waits_for_its_code_is_never_answered_by_originals(rig: Rig) -> None:
    rig.run()
    rig.program.code = Code.READY
    with expect(rig.cache, captures=1, graph_calls=1, replays=1):
        assert [rig.call(background_compile=False) for _ in range(2)] == [COMPILED_RAN] * 2
    assert rig.tiers == [Tier.ORIGINAL, Tier.COMPILED]
    with expect(rig.cache, replays=2):
        assert [rig.call(begins_run) for begins_run in (False, True)] == [ORIGINAL_RAN, COMPILED_RAN]
    assert rig.tiers == [Tier.COMPILED]


def test_a_call_that_has_to_run_eagerly_does_so_though_its_originals_are_captured(rig: Rig) -> None:
    rig.run()
    with expect(rig.cache, {"gradient": 1}, eager_calls=1):
        rig.call(policy=ANYTHING.eager(GRADIENT))


def test_with_new_weights_the_first_tier_is_captured_anew(rig: Rig) -> None:
    rig.run()
    rig.module.load(7.0)
    with expect(rig.cache, captures=1, eager_calls=1, replays=2):
        assert rig.run() == [7.0] * 3
    assert (rig.tiers, rig.program.open_graphs) == ([Tier.ORIGINAL], 1)


# --- what is known of one tier says nothing of the other ---


def test_a_capture_of_originals_that_fails_forbids_none_of_compiled_code(rig: Rig) -> None:
    rig.program.capture_failure = CaptureError("the original waits for the device")
    with expect(rig.cache, {"capture_failed": 3}, eager_calls=3):
        rig.run()
    assert rig.program.capture_attempts == 1
    rig.program.capture_failure, rig.program.code = None, Code.READY
    with expect(rig.cache, captures=1, graph_calls=1, replays=2):
        assert rig.run() == [COMPILED_RAN] * 3


@pytest.mark.parametrize("restarts", [False, True])
def test_originals_that_gain_nothing_from_a_capture_say_nothing_of_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    rig = Rig(store_folder=tmp_path)
    rig.program.capture_failure = NoGainError(0.1)
    with expect(rig.cache, eager_calls=3):
        rig.run()
    assert rig.program.capture_attempts == 1
    if restarts:
        rig = Rig(store_folder=tmp_path)
        with expect(rig.cache, eager_calls=3):
            rig.run()
        assert rig.program.capture_attempts == 0
    rig.program.capture_failure, rig.program.code = None, Code.READY
    with expect(rig.cache, captures=1, graph_calls=1, replays=2):
        assert rig.run() == [COMPILED_RAN] * 3


def test_what_a_run_works_in_is_kept_apart_by_tier(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that compares code takes more memory than its replay will."""
    rig.run()
    rig.program.code = Code.READY
    rig.run()
    states = {key.tier: state for key, state in rig.cache._capture_policy._states.items()}
    assert set(states) == {Tier.ORIGINAL, Tier.COMPILED}
    assert states[Tier.ORIGINAL] is not states[Tier.COMPILED]


# --- originals that are faster ---


class Watch:
    """By it each call that runs or replays compiled code takes twice as long."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def stop(self) -> None:
        self.took = self.rig.seconds[self.rig.latest]  # type: ignore[attr-defined]

    def seconds(self, wait: bool) -> float:
        return self.took


class Timed(Rig):
    """seconds: that a call takes, by what it ran."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.seconds = {ORIGINAL_RAN: 1.0, COMPILED_RAN: 2.0}
        self.latest = ORIGINAL_RAN
        self.cache.compiled_vs_eager._stopwatch = lambda device: Watch(self)  # type: ignore[assignment, return-value]

    def call(self, begins_run: bool = False, **changes: Any) -> float:
        self.latest = (
            ORIGINAL_RAN if self.program.code is not Code.READY or Tier.ORIGINAL in self.tiers else COMPILED_RAN
        )
        if begins_run and self.program.code is Code.READY:
            self.latest = COMPILED_RAN
        return super().call(begins_run, **changes)

    @property
    def trial(self) -> tuple[float, float]:
        """Seconds of compiled code and of originals."""
        found = self.cache.compiled_vs_eager.report()
        return (found[0]["seconds"], found[0]["original_seconds"]) if found else (0.0, 0.0)


def test_replays_of_originals_are_timed_as_such_and_compiled_code_that_loses_to_them_goes() -> None:
    rig = Timed()
    rig.run(6)
    assert rig.trial == (0.0, 1.0)
    rig.program.code = Code.READY
    assert rig.run(12) == [COMPILED_RAN] * 12, "so many are timed"
    with expect(rig.cache, {"not_faster": 3}, captures=1, graph_calls=1, replays=2):
        assert rig.run() == [ORIGINAL_RAN] * 3
    assert Tier.ORIGINAL in rig.tiers
    originals = rig.cache.stats.counters.original_replays
    with expect(rig.cache, {"not_faster": 3}, replays=3):
        assert rig.run() == [ORIGINAL_RAN] * 3, "it stays captured, though all code is there"
    assert rig.cache.stats.counters.original_replays == originals + 3


def test_a_call_that_is_left_alone_and_waits_for_nothing_of_its_code_is_captured_once(tmp_path: Path) -> None:
    """With RESOLUTE_COMPILE=before, after a start that measured it behind the picture."""
    rig = Timed(store_folder=tmp_path)
    rig.run(6)
    rig.program.code = Code.READY
    rig.run(14)
    rig.run()
    again = Timed(store_folder=tmp_path)
    again.program.code = Code.READY
    with expect(again.cache, {"not_faster": 3}, captures=1, graph_calls=1, replays=2):
        assert again.run(background_compile=False) == [ORIGINAL_RAN] * 3


def test_captures_in_which_compiled_code_runs_too_are_not_timed() -> None:
    rig = Timed()
    rig.program.is_mixed = True
    assert rig.run(8) == [ORIGINAL_RAN] * 8
    ((key, entry),) = rig.cache.captured()
    assert (key.tier, entry.is_mixed) == (Tier.ORIGINAL, True)
    rig.call()  # takes over the times before it
    assert rig.trial == (0.0, 0.0)


def test_a_replay_that_is_dropped_is_no_time_of_originals() -> None:
    """Its weights moved: the call is answered anew."""
    rig = Timed()
    rig.run(2)
    program, module = rig.program, rig.module
    program.code = Code.READY

    def changed() -> Call:
        module.load(7.0)
        return module.call(background_compile=True, tensors=[torch.full((1, 4, 8, 8), 3.0)])

    rig.cache.run(program, module.call(background_compile=True), changed)
    assert rig.cache.compiled_vs_eager._replayed is None
