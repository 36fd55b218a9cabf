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
def test_a_decision_takes_the_fastest_way_that_is_allowed_and_has_a_reason_if_it_is_another(
    situation: Situation,
) -> None:
    decision = decide(situation)
    is_blocked = situation.capture_blocker is not None
    is_bypassed = situation.forward_bypass is not None
    may_capture = situation.captures and not is_bypassed and not is_blocked
    nothing_else = not situation.compiles and (not situation.captures or is_blocked)
    assert (decision.action is Action.REPLAY) == (may_capture and situation.ready)
    assert (decision.action is Action.CAPTURE) == (may_capture and not situation.ready)
    assert (decision.action is Action.EAGER) == (is_bypassed or nothing_else)
    assert decision.action is not Action.REGIONS or situation.compiles
    assert (decision.reason is BYPASS) == is_bypassed
    if decision.action in fastest(situation):
        assert decision.reason is None or is_bypassed
    else:
        assert decision.reason in (BYPASS, BLOCKER)
