"""The policy of a call: by what it runs, and whether it may be repeated and captured. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from .errors import BypassCode, BypassReason


class Runs(Enum):
    """A call runs compiled code where there is some, or originals and their captures, or the forward alone."""

    CODE = "code"
    ORIGINALS = "originals"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """The adapter and then the cache narrow it by their checks; the first reason stays.

    is_repeatable: a second run computes the same, so the call may be timed, compared and remembered. may_capture: a
    replay may answer it later. reason: why it is less than everything, if people should know.
    """

    runs: Runs = Runs.CODE
    is_repeatable: bool = True
    may_capture: bool = True
    reason: BypassReason | None = None

    @property
    def is_eager(self) -> bool:
        return self.runs is Runs.EAGER

    @property
    def is_streamed(self) -> bool:
        """Some of its weights are not on the device: blocks that lack theirs run eagerly."""
        return self.reason is not None and self.reason.code is BypassCode.STREAMED_WEIGHTS

    def eager(self, reason: BypassReason) -> CallPolicy:
        """Something watches its forward, or changes it."""
        return CallPolicy(Runs.EAGER, is_repeatable=False, may_capture=False, reason=reason)

    def once(self, reason: BypassReason | None) -> CallPolicy:
        """It may do more than its key says, for this reason; None: nothing is known against it."""
        if reason is None or self.is_eager:
            return self
        return CallPolicy(self.runs, is_repeatable=False, may_capture=False, reason=self.reason or reason)

    def uncaptured(self) -> CallPolicy:
        """A capture would keep more memory than it is worth."""
        return replace(self, may_capture=False)

    def originals(self) -> CallPolicy:
        """Compiled code was measured to be slower on this device."""
        return replace(self, runs=Runs.ORIGINALS)


ANYTHING = CallPolicy()
