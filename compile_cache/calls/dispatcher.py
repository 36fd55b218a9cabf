"""The decision how a call is answered: a pure function, testable without a model or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import BypassReason


class Action(Enum):
    REPLAY = "replay"  # there is a capture of this signature
    CAPTURE = "capture"  # run through the compiled regions, then capture
    REGIONS = "regions"  # run through the compiled regions, without a capture
    EAGER = "eager"  # run the original forward


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the decision depends on.

    compiles, captures: what the backend can do on this device. ready: there is a capture for this key.
    forward_bypass: why this call must run the original forward. capture_blocker: why it must not be captured.
    """

    compiles: bool
    captures: bool
    ready: bool = False
    forward_bypass: BypassReason | None = None
    capture_blocker: BypassReason | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    reason: BypassReason | None = None


def decide(situation: Situation) -> Decision:
    """Choose the fastest correct path. Any slower path that a call is forced to take comes with its reason."""
    if situation.forward_bypass is not None:
        return Decision(Action.EAGER, situation.forward_bypass)
    if not situation.captures:
        return Decision(Action.REGIONS if situation.compiles else Action.EAGER)
    if situation.capture_blocker is not None:
        return Decision(Action.REGIONS if situation.compiles else Action.EAGER, situation.capture_blocker)
    return Decision(Action.REPLAY if situation.ready else Action.CAPTURE)
