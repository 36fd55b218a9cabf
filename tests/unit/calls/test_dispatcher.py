"""The dispatcher's decision in every possible situation."""

from __future__ import annotations

import itertools

import pytest

from compile_cache.calls.dispatcher import Action, Situation, decide
from compile_cache.errors import BypassCode, BypassReason

BYPASS = BypassReason(BypassCode.GRADIENT, "gradients are on")
BLOCKER = BypassReason(BypassCode.STREAMED_WEIGHTS, "weights are streamed")

SITUATIONS = [
    Situation(*flags, *reasons)
    for flags in itertools.product((False, True), repeat=3)
    for reasons in itertools.product((None, BYPASS), (None, BLOCKER))
]


def fastest(situation: Situation) -> set[Action]:
    """The backend's fastest actions if nothing is bypassed or blocked."""
    if situation.captures:
        return {Action.REPLAY if situation.ready else Action.CAPTURE}
    return {Action.REGIONS if situation.compiles else Action.EAGER}


@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
class TestEverySituation:
    def test_a_replay_happens_exactly_if_a_capture_exists_and_is_allowed(self, situation: Situation) -> None:
        allowed = situation.captures and situation.forward_bypass is None and situation.capture_blocker is None
        assert (decide(situation).action is Action.REPLAY) == (allowed and situation.ready)

    def test_a_capture_happens_exactly_if_none_exists_and_it_is_allowed(self, situation: Situation) -> None:
        allowed = situation.captures and situation.forward_bypass is None and situation.capture_blocker is None
        assert (decide(situation).action is Action.CAPTURE) == (allowed and not situation.ready)

    def test_a_bypass_of_the_forward_runs_the_original_with_its_reason(self, situation: Situation) -> None:
        if situation.forward_bypass is not None:
            decision = decide(situation)
            assert decision.action is Action.EAGER
            assert decision.reason is BYPASS
        else:
            assert decide(situation).reason is not BYPASS

    def test_the_original_runs_only_if_necessary(self, situation: Situation) -> None:
        nothing_else = not situation.compiles and (not situation.captures or situation.capture_blocker is not None)
        has_to = situation.forward_bypass is not None or nothing_else
        assert (decide(situation).action is Action.EAGER) == has_to

    def test_regions_run_only_on_a_backend_that_compiles(self, situation: Situation) -> None:
        if decide(situation).action is Action.REGIONS:
            assert situation.compiles

    def test_there_is_a_reason_exactly_if_the_path_is_not_the_fastest(self, situation: Situation) -> None:
        decision = decide(situation)
        if decision.action in fastest(situation):
            assert decision.reason is None or situation.forward_bypass is not None
        else:
            assert decision.reason in (BYPASS, BLOCKER)


def test_every_situation_is_tested() -> None:
    assert len(set(SITUATIONS)) == 2**5
    assert {decide(situation).action for situation in SITUATIONS} == set(Action)
