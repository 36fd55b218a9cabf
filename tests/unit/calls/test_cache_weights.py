"""GraphCache and weights that come and go: every `pin` has its `unpin`, on every path of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from compile_cache.backends.base import Capabilities
from compile_cache.backends.cuda_graphs.run_cost import RunCost
from compile_cache.call_policy import ANYTHING
from compile_cache.calls import cache as cache_module
from compile_cache.calls.cache import GraphCache
from compile_cache.captures import attempts
from compile_cache.config import CacheConfig
from compile_cache.errors import CaptureError
from compile_cache.weights import Weights

from ..fakes import GRADIENT, MIB, OBSERVED, FakeProgram, StoppingProgress, answer, expect, oom


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


@pytest.fixture
def weights() -> Iterator[CountingWeights]:
    weights = CountingWeights()
    yield weights
    assert (weights.pins, weights.is_in_place) == (0, False)


@pytest.fixture
def program(weights: CountingWeights) -> WatchingProgram:
    return WatchingProgram(weights)


def test_a_run_and_its_capture_have_the_weights_in_place_under_one_pin(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    with expect(cache, graph_calls=1, captures=1):
        assert answer(cache.run(program, module.call(weights=weights))) == 2.0
    assert program.in_place == [True]
    assert weights.pinned_so_far == 1


def test_a_replay_is_pinned_while_it_is_launched(cache: GraphCache, program: Any, module: Any, weights: Any) -> None:
    cache.run(program, module.call(weights=weights))
    launched: list[int] = []
    replay = program.graphs[0].replay
    program.graphs[0].replay = lambda tensors: launched.append(weights.pins) or replay(tensors)
    with expect(cache, replays=1):
        cache.run(program, module.call(weights=weights))
    assert launched == [1]


@pytest.mark.parametrize("failure", [RuntimeError("the launch failed"), oom()], ids=["fails", "out of memory"])
def test_a_replay_that_fails_is_unpinned_before_the_original_runs(
    cache: GraphCache, program: Any, module: Any, weights: Any, failure: Exception
) -> None:
    cache.run(program, module.call(weights=weights))
    program.graphs[0].failure = failure
    pins: list[int] = []
    call = module.call(weights=weights, invoke=lambda tensors: pins.append(weights.pins) or module.forward(*tensors))
    assert answer(cache.run(program, call)) == 2.0
    assert pins == [0]  # the original needs the memory


@pytest.mark.parametrize("failure", [CaptureError("not permitted"), oom(), RuntimeError("strange")], ids=repr)
def test_a_capture_that_fails(cache: GraphCache, program: Any, module: Any, weights: Any, failure: Exception) -> None:
    program.capture_failure = failure
    with expect(cache, {"capture_failed": 1}, graph_calls=1):
        assert answer(cache.run(program, module.call(weights=weights))) == 2.0


def test_a_cancel_before_a_capture(cache: GraphCache, program: Any, module: Any, weights: Any) -> None:
    with pytest.raises(InterruptedError):
        cache.run(program, module.call(weights=weights, progress=StoppingProgress()))


@pytest.mark.parametrize("failure", [InterruptedError("cancelled"), ValueError("of the model")], ids=repr)
def test_a_run_that_raises(cache: GraphCache, program: Any, module: Any, weights: Any, failure: Exception) -> None:
    program.run_failures = [failure]
    with pytest.raises(type(failure)):
        cache.run(program, module.call(weights=weights))


def test_a_run_without_memory_is_answered_by_the_original_with_nothing_pinned(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    """Pinned weights cannot make room, so the original can succeed though there was no capture to free."""
    program.run_failures = [oom()]
    pins: list[int] = []
    call = module.call(weights=weights, invoke=lambda tensors: pins.append(weights.pins) or module.forward(*tensors))
    with expect(cache, {"out_of_memory": 1}, eager_calls=1):
        assert answer(cache.run(program, call)) == 2.0
    assert pins == [0]
    assert weights.times_short == 1


def test_after_that_its_blocks_get_their_weights_one_by_one(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    program.run_failures = [oom()]
    cache.run(program, module.call(weights=weights))
    pinned = weights.pinned_so_far
    with expect(cache, {"out_of_memory": 1}, graph_calls=1):
        cache.run(program, module.call(weights=weights))
    assert weights.pinned_so_far == pinned
    assert program.in_place == [True, False]


def test_an_eager_call_pins_nothing(cache: GraphCache, program: Any, module: Any, weights: Any) -> None:
    with expect(cache, {"gradient": 1}, eager_calls=1):
        cache.run(program, module.call(weights=weights, policy=ANYTHING.eager(GRADIENT)))
    assert weights.pinned_so_far == 0


def test_a_call_that_may_not_be_captured_still_runs_with_its_weights_in_place(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    with expect(cache, {"observed_input": 1}, graph_calls=1):
        cache.run(program, module.call(weights=weights, policy=ANYTHING.once(OBSERVED)))
    assert program.in_place == [True]


def test_a_call_that_does_not_fit_runs_uncaptured_and_the_next_one_that_fits_is_captured(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    weights.room = False
    with expect(cache, {"streamed_weights": 2}, graph_calls=2):
        for _ in range(2):
            assert answer(cache.run(program, module.call(weights=weights))) == 2.0
    assert program.in_place == [False, False]
    weights.room = True
    with expect(cache, graph_calls=1, captures=1):
        cache.run(program, module.call(weights=weights))


def test_a_capture_without_its_weights_is_kept_but_not_replayed(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    cache.run(program, module.call(weights=weights))
    weights.room = False
    with expect(cache, {"streamed_weights": 1}, graph_calls=1):
        assert answer(cache.run(program, module.call(weights=weights))) == 2.0
    weights.room = True
    with expect(cache, replays=1):
        cache.run(program, module.call(weights=weights))


@pytest.mark.parametrize("captured", [False, True], ids=["before a capture", "with a capture"])
def test_a_backend_that_compiles_nothing_runs_the_original_if_the_weights_do_not_fit(
    cache: GraphCache, module: Any, weights: Any, captured: bool
) -> None:
    program = WatchingProgram(weights, capabilities=Capabilities(available=True, captures=True))
    if captured:
        cache.run(program, module.call(weights=weights))
    weights.room = False
    with expect(cache, {"streamed_weights": 1}, eager_calls=1):
        assert answer(cache.run(program, module.call(weights=weights))) == 2.0


@pytest.mark.parametrize("captured", [False, True], ids=["before a capture", "with a capture"])
def test_what_loading_a_weight_raises_is_raised(
    cache: GraphCache, program: Any, module: Any, weights: Any, captured: bool
) -> None:
    if captured:
        cache.run(program, module.call(weights=weights))
    weights.failure = OSError("the file is gone")
    with pytest.raises(OSError, match="gone"):
        cache.run(program, module.call(weights=weights))


def test_a_replay_that_turns_out_stale_is_unpinned_before_the_call_is_answered_anew(
    cache: GraphCache, program: Any, module: Any, weights: Any
) -> None:
    cache.run(program, module.call(weights=weights))
    module.load(5.0)
    stale = module.call(weights=weights, epoch=1)
    pins: list[int] = []

    def recheck() -> Any:
        pins.append(weights.pins)
        return module.call(weights=weights)

    with expect(cache, graph_calls=1, captures=1):
        assert answer(cache.run(program, stale, recheck)) == 5.0
    assert pins == [0]


# --- a card that is too small for all weights ------------------------------------------------------------------------


class Card:
    """A device that could give `reach` bytes, and a cache that looks at it before each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reach, self.work = 0, 0
        monkeypatch.setattr(attempts, "_CHECK_SECONDS", 0.0)
        for each in (cache_module, attempts):
            monkeypatch.setattr(each, "cost_of_run", lambda device: nullcontext(RunCost(self.work)))
        self.cache = GraphCache(CacheConfig(spare_bytes=100 * MIB), lambda device: self.reach)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_weights_that_cannot_all_be_there_are_not_asked_for(
    card: Card, program: Any, module: Any, weights: Any
) -> None:
    card.reach, weights.room = 1150 * MIB, False
    with expect(card.cache, {"streamed_weights": 40}, graph_calls=40):
        for _ in range(40):
            assert answer(card.cache.run(program, module.call(weights=weights))) == 2.0
    assert (weights.asked, program.capture_attempts) == (0, 0)
    card.reach, weights.room = 1450 * MIB, True  # another program ended
    with expect(card.cache, graph_calls=1, captures=1):
        card.cache.run(program, module.call(weights=weights))


def test_weights_that_find_no_room_twice_are_not_asked_for_again(
    card: Card, program: Any, module: Any, weights: Any
) -> None:
    """Once may be by chance: another model was about to leave."""
    card.reach, weights.room = 2000 * MIB, False
    with expect(card.cache, {"streamed_weights": 40}, graph_calls=40):
        for _ in range(40):
            card.cache.run(program, module.call(weights=weights))
    assert weights.asked == 2


@pytest.mark.parametrize("captured", [True, False], ids=["a capture", "none"])
def test_once_is_forgiven(card: Card, program: Any, module: Any, weights: Any, captured: bool) -> None:
    card.reach = 2000 * MIB
    if captured:
        card.cache.run(program, module.call(weights=weights))
    weights.room, asked = False, weights.asked
    with expect(card.cache, {"streamed_weights": 1}, graph_calls=1):
        card.cache.run(program, module.call(weights=weights))
    assert weights.asked == asked + 1
    weights.room = True
    with expect(card.cache, **({"replays": 1} if captured else {"graph_calls": 1, "captures": 1})):
        card.cache.run(program, module.call(weights=weights))


def test_no_capture_is_tried_without_room_for_it_beside_the_weights(
    card: Card, program: Any, module: Any, weights: Any
) -> None:
    card.reach, card.work = 1800 * MIB, 700 * MIB
    with expect(card.cache, {"capture_failed": 20}, graph_calls=20):
        for _ in range(20):
            card.cache.run(program, module.call(weights=weights))
    assert program.capture_attempts == 0
    assert program.in_place == [True] * 20  # the run itself fits
    card.reach = 2100 * MIB
    with expect(card.cache, graph_calls=1, captures=1):
        card.cache.run(program, module.call(weights=weights))
    smaller = module.call(16, weights=weights)
    card.reach, card.work = 1800 * MIB, 300 * MIB
    with expect(card.cache, graph_calls=1, captures=1):
        card.cache.run(program, smaller)


def test_with_little_room_a_call_runs_once_as_it_is_to_find_out_what_it_needs(
    card: Card, program: Any, module: Any, weights: Any
) -> None:
    card.reach, card.work = 1350 * MIB, 20 * MIB
    with expect(card.cache, eager_calls=1):
        assert answer(card.cache.run(program, module.call(weights=weights, is_behind=True))) == 2.0
    assert weights.asked == 0
    with expect(card.cache, graph_calls=1, captures=1):
        card.cache.run(program, module.call(weights=weights, is_behind=True))
    larger, card.work = module.call(16, weights=weights, is_behind=True), 300 * MIB
    with expect(card.cache, {"streamed_weights": 1}, eager_calls=1, graph_calls=1):
        for _ in range(2):
            card.cache.run(program, larger)
    assert weights.pins == 0
    card.work = 20 * MIB  # compiled code needs less
    with expect(card.cache, {"streamed_weights": 1}, graph_calls=2, captures=1):
        for _ in range(2):
            card.cache.run(program, larger)


@pytest.mark.parametrize("changes", [{"is_behind": True, "reach": 20_000}, {"is_behind": False, "reach": 1350}])
def test_other_calls_are_not_measured_first(
    card: Card, program: Any, module: Any, weights: Any, changes: dict[str, Any]
) -> None:
    card.reach = changes.pop("reach") * MIB
    with expect(card.cache, graph_calls=1, captures=1):
        card.cache.run(program, module.call(weights=weights, **changes))
