"""The policy of a call: which path it runs, and whether it may be repeated and captured. Plain data, no torch.

Those who narrow it: the adapters' `call_description`, `module_runner` and `module_state`, then `cache/capture_policy`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from .errors import BypassCode, BypassReason


class Runs(Enum):
    """The path of a call: compiled code where it exists, original blocks and their captures, or the forward alone."""

    CODE = "code"
    ORIGINALS = "originals"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """The adapter's checks and then the cache's checks narrow the policy; the first reason is kept.

    is_repeatable: a second run computes the same, so the call may be timed, compared and remembered. may_capture: a
    replay may answer it later. reason: why the policy was narrowed, if users should know.
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
        """Some of the call's weights are not on the device; blocks whose weights are missing run eagerly."""
        return self.reason is not None and self.reason.code is BypassCode.STREAMED_WEIGHTS

    def eager(self, reason: BypassReason) -> CallPolicy:
        """Return the policy of a call whose forward is observed or changed by other code."""
        return CallPolicy(Runs.EAGER, is_repeatable=False, may_capture=False, reason=reason)

    def run_once(self, reason: BypassReason | None) -> CallPolicy:
        """Forbid repeats and captures: the key may not describe all that the call does. None changes nothing."""
        if reason is None or self.is_eager:
            return self
        return CallPolicy(self.runs, is_repeatable=False, may_capture=False, reason=self.reason or reason)

    def uncaptured(self) -> CallPolicy:
        """Forbid captures: one would occupy more memory than it is worth."""
        return replace(self, may_capture=False)

    def originals(self) -> CallPolicy:
        """Run the originals: compiled code was measured to be slower on this device."""
        return replace(self, runs=Runs.ORIGINALS)


ANYTHING = CallPolicy()
