"""The tiers of captures, as in a JIT compiler: originals are captured at once, compiled code after them.

The first tier replays the application's own code for regions that are not compiled yet. When all code of such a call
is ready and was compared, its capture is discarded, and the next call is captured again. That happens at the start of a
sampling run, never between two of its steps.
"""

from __future__ import annotations

from collections.abc import Callable

from ..backends.base import Call, Code, Program
from ..call_policy import Runs
from ..keys import COMPILED_NOW, CaptureKey, Tier
from .captures import Captures


class Tiers:
    """Chooses the tier of each call. GraphCache's lock guards it."""

    def __init__(self, captures: Captures, stays_eager: Callable[[CaptureKey], bool]) -> None:
        """stays_eager: compiled code of the call was measured to be slower, so its originals stay captured."""
        self._captures, self._stays_eager = captures, stays_eager
        self._to_compare: set[CaptureKey] = set()  # captures whose call compares code, once in this sampling run
        self._swapped: set[CaptureKey] = set()  # second-tier captures that replace a first-tier one

    def begin_run(self, program: Program) -> None:
        """Start a sampling run: discard first-tier captures whose code is all ready now."""
        self._to_compare = {key for key in self._to_compare if key.owner != program.owner}
        for key in self._captures.of_first_tier(program.owner):
            if self._stays_eager(key):
                continue
            code = program.code_of(key.graph)
            if code is Code.READY and program.has_run(key.graph):
                self._captures.discard(key)
                self._swapped.add(_of(key, Tier.COMPILED))
            elif code is Code.UNVERIFIED:
                self._to_compare.add(key)

    def key_of(self, program: Program, call: Call, compiled: CaptureKey) -> CaptureKey:
        """Return the key in the tier that answers the call. compiled: the key in the second tier.

        A warm-up, and any other call that waits for its code, is never answered by the first tier, unless its originals
        are faster. If another program made a call's capture, the call runs once, to learn which code this one lacks.
        """
        original = _of(compiled, Tier.ORIGINAL)
        if call.policy.runs is Runs.ORIGINALS:
            return original
        is_known = program.has_run(call.key) or not call.begins_run
        if call.background_compile and (
            program.code_of(call.key) is not Code.READY or (is_known and original in self._captures)
        ):
            return original
        return compiled

    @staticmethod
    def key_that_ran(program: Program, call: Call, key: CaptureKey) -> CaptureKey:
        """Return the key of the call that `program.run` has just answered: missing code shows only then."""
        return _of(key, Tier.ORIGINAL if program.ran_originals or call.policy.runs is Runs.ORIGINALS else Tier.COMPILED)

    def captured(self, call: Call, key: CaptureKey) -> None:
        """Record that the call was captured: at the start of a run, the second tier replaces the first."""
        if call.begins_run and key.tier is Tier.COMPILED:
            self._captures.discard(_of(key, Tier.ORIGINAL))

    def compares(self, key: CaptureKey) -> bool:
        """True if the call runs once in place of its replay, to compare code that has become ready."""
        return key in self._to_compare

    def compared(self, key: CaptureKey) -> None:
        self._to_compare.discard(key)

    def why(self, key: CaptureKey) -> str:
        """Return why a call is captured now, if its tier is the reason; empty from the second time on."""
        if key not in self._swapped:
            return ""
        self._swapped.discard(key)
        return COMPILED_NOW


def _of(key: CaptureKey, tier: Tier) -> CaptureKey:
    if key.tier is tier:
        return key
    return CaptureKey(key.graph, key.device, key.owner, key.epoch, key.torch_flags, tier)
