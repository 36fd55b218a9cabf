"""What happens to a call: a pure decision, tested without a model and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .errors import BypassReason


class Action(Enum):
    REPLAY = "replay"  # a capture of this very signature is there
    CAPTURE = "capture"  # run now through the compiled regions, capture right after
    REGIONS = "regions"  # run through the compiled regions, without a capture
    EAGER = "eager"  # run the original forward


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the decision depends on.

    `forward_bypass` forbids any graph for this call, `capture_blocker` only a capture. `ready` says that a capture
    for this key is there. `compiles` and `captures` are what the backend can do on this device.
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
    """Choose the fastest path that is right. A reason comes with every path that is not the fastest one."""
    if situation.forward_bypass is not None:
        return Decision(Action.EAGER, situation.forward_bypass)
    if not situation.captures:
        return Decision(Action.REGIONS if situation.compiles else Action.EAGER)
    if situation.capture_blocker is not None:
        return Decision(Action.REGIONS if situation.compiles else Action.EAGER, situation.capture_blocker)
    return Decision(Action.REPLAY if situation.ready else Action.CAPTURE)
