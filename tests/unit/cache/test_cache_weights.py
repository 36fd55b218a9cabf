"""GraphCache and weights that come and go: every `pin` has its `unpin`, on every path of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from compile_cache.backends.base import Capabilities
from compile_cache.cache import capture_policy
from compile_cache.cache import graph_cache as cache_module
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING
from compile_cache.config import CacheConfig
from compile_cache.errors import CaptureError
from compile_cache.tuning.stopwatch import RunCost
from compile_cache.weights import Weights

from .. import fakes
from ..fakes import GRADIENT, MIB, OBSERVED, FakeProgram, StoppingProgress, answer, oom


class CountingWeights(Weights):
    """Pages that find room while `room` is true. asked: how often they were to be brought in."""

    pages = True
    bytes = 1000 * MIB

    def __init__(self) -> None:
        self.room = True
        self.failure: BaseException | None = None
        self.pins = 0
        self.asked = 0
        self.pinned_so_far = 0
        self.is_in_place = False
        self.times_short = 0

    def pin(self) -> bool:
        if self.failure is not None:
            raise self.failure
        self.asked += 1
        self.pins += self.room
        self.pinned_so_far += self.room
        return self.room

    def unpin(self) -> None:
        assert self.pins > 0, "unpinned more often than pinned"
        self.pins -= 1

    def ran_out(self) -> None:
        assert self.pins == 0
        self.times_short += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        assert self.pins > 0, "put in place without a pin"
        self.is_in_place = True
        try:
            yield
        finally:
            self.is_in_place = False


class WatchingProgram(FakeProgram):
    """Notes whether the weights were in place in each run and capture."""

    def __init__(self, weights: CountingWeights, **changes: Any) -> None:
        super().__init__(**changes)
        self.weights = weights
        self.in_place: list[bool] = []

    def run(self, call: Any) -> Any:
        self.in_place.append(self.weights.is_in_place)
        return super().run(call)

    def capture(self, *arguments: Any) -> Any:
        assert self.weights.is_in_place
        return super().capture(*arguments)


class Rig(fakes.Rig):
    """Its calls have such weights."""

    program: WatchingProgram

    def __init__(self, cache: GraphCache | None = None, **settings: Any) -> None:
        self.weights = CountingWeights()
        super().__init__(cache, WatchingProgram(self.weights, **settings))

    def call(self, *side: int, **changes: Any) -> Any:
        return self.module.call(*side, **{"weights": self.weights, **changes})

    def run(self, *side: int, times: int = 1, **changes: Any) -> float:
        return super().run(*side, times=times, **{"weights": self.weights, **changes})

    @contextmanager
    def pins_of_the_original(self) -> Iterator[list[int]]:
        """How often the weights are pinned when the original runs."""
        pins: list[int] = []
        forward = self.module.forward
        self.module.forward = lambda x: pins.append(self.weights.pins) or forward(x)  # type: ignore[method-assign,func-returns-value]
        yield pins


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert (rig.weights.pins, rig.weights.is_in_place) == (0, False)


def test_a_run_and_its_capture_have_the_weights_in_place_under_one_pin(rig: Rig) -> None:
    with rig.expect(graph_calls=1, captures=1):
        assert rig.run() == 2.0
    assert (rig.program.in_place, rig.weights.pinned_so_far) == ([True], 1)


def test_a_replay_is_pinned_while_it_is_launched(rig: Rig) -> None:
    rig.run()
    launched: list[int] = []
    (graph,) = rig.program.graphs
    replay = graph.replay
    graph.replay = lambda tensors: launched.append(rig.weights.pins) or replay(tensors)  # type: ignore[method-assign,func-returns-value]
    with rig.expect(replays=1):
        rig.run()
    assert launched == [1]


@pytest.mark.parametrize("failure", [RuntimeError("the launch failed"), oom()], ids=["fails", "out of memory"])
def test_a_replay_that_fails_is_unpinned_before_the_original_runs(rig: Rig, failure: Exception) -> None:
    rig.run()
    rig.program.graphs[0].failure = failure
    with rig.pins_of_the_original() as pins:
        assert rig.run() == 2.0
    assert pins == [0]  # the original needs the memory


@pytest.mark.parametrize("failure", [CaptureError("not permitted"), oom(), RuntimeError("strange")], ids=repr)
def test_a_capture_that_fails(rig: Rig, failure: Exception) -> None:
    rig.program.capture_failure = failure
    with rig.expect({"capture_failed": 1}, graph_calls=1):
        assert rig.run() == 2.0


def test_a_cancel_before_a_capture(rig: Rig) -> None:
    with pytest.raises(InterruptedError):
        rig.run(progress=StoppingProgress())


@pytest.mark.parametrize("failure", [InterruptedError("cancelled"), ValueError("of the model")], ids=repr)
def test_a_run_that_raises(rig: Rig, failure: Exception) -> None:
    rig.program.run_failures = [failure]
    with pytest.raises(type(failure)):
        rig.run()


def test_a_run_without_memory_is_answered_by_the_original_with_nothing_pinned(rig: Rig) -> None:
    """Pinned weights cannot make room, so the original can succeed though there was no capture to free."""
    rig.program.run_failures = [oom()]
    with rig.expect({"out_of_memory": 1}, eager_calls=1), rig.pins_of_the_original() as pins:
        assert rig.run() == 2.0
    assert (pins, rig.weights.times_short) == ([0], 1)


def test_after_that_its_blocks_get_their_weights_one_by_one(rig: Rig) -> None:
    rig.program.run_failures = [oom()]
    rig.run()
    pinned = rig.weights.pinned_so_far
    with rig.expect({"out_of_memory": 1}, graph_calls=1):
        rig.run()
    assert (rig.weights.pinned_so_far, rig.program.in_place) == (pinned, [True, False])


def test_an_eager_call_pins_nothing(rig: Rig) -> None:
    with rig.expect({"gradient": 1}, eager_calls=1):
        rig.run(policy=ANYTHING.eager(GRADIENT))
    assert rig.weights.pinned_so_far == 0


def test_a_call_that_may_not_be_captured_still_runs_with_its_weights_in_place(rig: Rig) -> None:
    with rig.expect({"observed_input": 1}, graph_calls=1):
        rig.run(policy=ANYTHING.run_once(OBSERVED))
    assert rig.program.in_place == [True]


def test_a_call_that_does_not_fit_runs_uncaptured_and_the_next_one_that_fits_is_captured(rig: Rig) -> None:
    rig.weights.room = False
    with rig.expect({"streamed_weights": 2}, graph_calls=2):
        assert rig.run(times=2) == 2.0
    assert rig.program.in_place == [False, False]
    rig.weights.room = True
    with rig.expect(graph_calls=1, captures=1):
        rig.run()


def test_a_capture_without_its_weights_is_kept_but_not_replayed(rig: Rig) -> None:
    rig.run()
    rig.weights.room = False
    with rig.expect({"streamed_weights": 1}, graph_calls=1):
        assert rig.run() == 2.0
    rig.weights.room = True
    with rig.expect(replays=1):
        rig.run()


once = pytest.mark.parametrize("captured", [False, True], ids=["before a capture", "with a capture"])


@once
def test_a_backend_that_compiles_nothing_runs_the_original_if_the_weights_do_not_fit(captured: bool) -> None:
    rig = Rig(capabilities=Capabilities(available=True, captures=True))
    if captured:
        rig.run()
    rig.weights.room = False
    with rig.expect({"streamed_weights": 1}, eager_calls=1):
        assert rig.run() == 2.0
    assert (rig.weights.pins, rig.weights.is_in_place) == (0, False)


@once
def test_what_loading_a_weight_raises_is_raised(rig: Rig, captured: bool) -> None:
    if captured:
        rig.run()
    rig.weights.failure = OSError("the file is gone")
    with pytest.raises(OSError, match="gone"):
        rig.run()


def test_a_replay_that_turns_out_stale_is_unpinned_before_the_call_is_answered_anew(rig: Rig) -> None:
    rig.run()
    rig.module.load(5.0)
    pins: list[int] = []

    def recheck() -> Any:
        pins.append(rig.weights.pins)
        return rig.call()

    with rig.expect(graph_calls=1, captures=1):
        assert answer(rig.cache.run(rig.program, rig.call(epoch=1), recheck)) == 5.0
    assert pins == [0]


# --- a card that is too small for all weights ------------------------------------------------------------------------


class Card(Rig):
    """A device that could give `reach` bytes, and a cache that looks at it before each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reach, self.work = 0, 0
        monkeypatch.setattr(capture_policy, "_CHECK_SECONDS", 0.0)
        for each in (cache_module, capture_policy):
            monkeypatch.setattr(each, "cost_of_run", lambda device: nullcontext(RunCost(self.work)))
        super().__init__(GraphCache(CacheConfig(spare_bytes=100 * MIB), lambda device: self.reach))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card(monkeypatch)
    yield card
    assert (card.weights.pins, card.weights.is_in_place) == (0, False)


def test_weights_that_cannot_all_be_there_are_not_asked_for(card: Card) -> None:
    card.reach, card.weights.room = 1150 * MIB, False
    with card.expect({"streamed_weights": 40}, graph_calls=40):
        assert card.run(times=40) == 2.0
    assert (card.weights.asked, card.program.capture_attempts) == (0, 0)
    card.reach, card.weights.room = 1450 * MIB, True  # another program ended
    with card.expect(graph_calls=1, captures=1):
        card.run()


def test_weights_that_find_no_room_twice_are_not_asked_for_again(card: Card) -> None:
    """Once may be by chance: another model was about to leave."""
    card.reach, card.weights.room = 2000 * MIB, False
    with card.expect({"streamed_weights": 40}, graph_calls=40):
        card.run(times=40)
    assert card.weights.asked == 2


@once
def test_once_is_forgiven(card: Card, captured: bool) -> None:
    card.reach = 2000 * MIB
    if captured:
        card.run()
    card.weights.room, asked = False, card.weights.asked
    with card.expect({"streamed_weights": 1}, graph_calls=1):
        card.run()
    assert card.weights.asked == asked + 1
    card.weights.room = True
    with card.expect(**({"replays": 1} if captured else {"graph_calls": 1, "captures": 1})):
        card.run()


def test_no_capture_is_tried_without_room_for_it_beside_the_weights(card: Card) -> None:
    card.reach, card.work = 1800 * MIB, 700 * MIB
    with card.expect({"capture_failed": 20}, graph_calls=20):
        card.run(times=20)
    assert card.program.capture_attempts == 0
    assert card.program.in_place == [True] * 20  # the run itself fits
    card.reach = 2100 * MIB
    with card.expect(graph_calls=1, captures=1):
        card.run()
    card.reach, card.work = 1800 * MIB, 300 * MIB
    with card.expect(graph_calls=1, captures=1):
        card.run(16)


def test_with_little_room_a_call_runs_once_as_it_is_to_find_out_what_it_needs(card: Card) -> None:
    card.reach, card.work = 1350 * MIB, 20 * MIB
    with card.expect(eager_calls=1):
        assert card.run(background_compile=True) == 2.0
    assert card.weights.asked == 0
    with card.expect(graph_calls=1, captures=1):
        card.run(background_compile=True)
    card.work = 300 * MIB
    with card.expect({"streamed_weights": 1}, eager_calls=1, graph_calls=1):
        card.run(16, times=2, background_compile=True)
    assert card.weights.pins == 0
    card.work = 20 * MIB  # compiled code needs less
    with card.expect({"streamed_weights": 1}, graph_calls=2, captures=1):
        card.run(16, times=2, background_compile=True)


@pytest.mark.parametrize(
    "changes", [{"background_compile": True, "reach": 20_000}, {"background_compile": False, "reach": 1350}]
)
def test_other_calls_are_not_measured_first(card: Card, changes: dict[str, Any]) -> None:
    card.reach = changes["reach"] * MIB
    with card.expect(graph_calls=1, captures=1):
        card.run(background_compile=changes["background_compile"])
