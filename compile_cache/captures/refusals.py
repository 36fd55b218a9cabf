"""Reasons why the cache does not capture a call. This file alone keeps and words them.

A recording itself finds that it is over the budget or gains nothing, and the weights that they do not all fit.

What forbids the capture of a call from outside the cache comes with the call, as `Call.capture_blocker`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..backends.cuda_graphs.memory import room_for
from ..choices.gpu_bound import GpuBoundCalls
from ..errors import BypassCode, BypassReason, NoGainError, OverBudgetError, first_line
from ..keys import ANY_EPOCH, CallWithoutEpoch, CaptureKey
from ..stats import Stats
from ..torch_facts.out_of_memory import is_out_of_memory
from .room import OutOfMemoryBackoff, Reach, free_bytes

logger = logging.getLogger(__name__)

NOT_RESIDENT = BypassReason(
    BypassCode.STREAMED_WEIGHTS, "the weights do not all fit into free memory, so blocks get theirs one by one"
)


class Refusals:
    """The calls that are not captured, each with its reason. GraphCache's lock guards it.

    A lack of memory passes, and holds for every load of the weights, because each needs as much. Another failure holds
    for good, but only for its weights epoch.
    """

    def __init__(
        self, stats: Stats, folder: Path | None, source: str = "", spare: int = 0, reach: Reach = free_bytes
    ) -> None:
        """folder, source: see `GpuBoundCalls`. spare: see `CacheConfig`. reach: see `OutOfMemoryBackoff`."""
        self._stats = stats
        self._spare, self._reach = spare, reach
        self._failed: dict[CaptureKey, BypassReason] = {}
        self.backoff = OutOfMemoryBackoff(reach)
        self._short: set[CallWithoutEpoch] = set()  # whose weights did not fit once, though there seemed to be room
        self._worked_in: dict[CallWithoutEpoch, int] = {}  # bytes that a run allocated at once, at most
        self._needed: dict[CallWithoutEpoch, int] = {}  # bytes that a refused capture would work in
        self.gpu_bound = GpuBoundCalls(folder and folder / "captures", source)

    # --- asked before a capture --------------------------------------------------------------------------------

    def reason(self, key: CaptureKey) -> BypassReason | None:
        """Why a call is not captured now; None if nothing is known against it."""
        return self._failed.get(key) or self.backoff.reason(key)

    def may_bring_in(self, key: CaptureKey, pages: int, to_capture: bool) -> bool:
        """True if all weights of a call are to be brought in: so many bytes, which may push out those of others."""
        reason = self.reason(key)
        if reason is not None and reason.code in (BypassCode.OUT_OF_MEMORY, BypassCode.STREAMED_WEIGHTS):
            return False
        if to_capture and not self.fits(key, pages):
            self.not_resident(key, pages)
            return False
        return True

    def fits(self, key: CaptureKey, pages: int) -> bool:
        """True if so many bytes of weights can be there, beside what a capture of the call needs, as far as known."""
        reach = self._reach(key.device)
        return not reach or reach >= pages + room_for(self._worked_in.get(key.without_epoch, 0)) + self._spare

    def gains_nothing(self, key: CaptureKey) -> bool:
        """True if the GPU is busy all the time without a capture of this call. That is no bypass."""
        return self.gpu_bound.has(key)

    def refuse_if_too_large(self, key: CaptureKey, room: int, budget: int) -> bool:
        """Refuse the call without another rehearsal if an earlier one needed more than `room` bytes."""
        needed = self._needed.get(key.without_epoch, 0)
        if needed > room:
            self.over_budget(key, needed, budget, room)
        return needed > room

    # --- told by what ran or failed ----------------------------------------------------------------------------

    def worked_in(self, key: CaptureKey, size: int) -> None:
        """A run of the call allocated so many bytes at once."""
        self._worked_in[key.without_epoch] = size

    def not_resident(self, key: CaptureKey, pages: int) -> None:
        """The weights, so many bytes, did not all fit, or cannot. They are asked for again when more memory is within
        reach; where there seemed to be enough, once more before.
        """
        if not self._reach(key.device):
            return
        call = key.without_epoch
        if not self.fits(key, pages) or call in self._short:
            self._short.discard(call)
            self.backoff.add(key, NOT_RESIDENT)
        else:
            self._short.add(call)

    def no_room(self, key: CaptureKey) -> None:
        """The weights are there, and beside them is too little memory for a capture. Nothing was tried."""
        detail = f"beside the weights, too little memory is free for a capture of {key.shape}"
        self._refuse(key, BypassReason(BypassCode.CAPTURE_FAILED, detail), passes=True)

    def capture_failed(self, key: CaptureKey, error: Exception, budget: int, room: int = 0) -> None:
        """`Program.capture` raised. room: see `over_budget`."""
        if isinstance(error, NoGainError):
            self.gpu_bound.add(key)
            logger.info("Resolute: %s is not captured, since that would gain nothing: %s", key.shape, error)
        elif isinstance(error, OverBudgetError):
            self._needed[key.without_epoch] = error.bytes
            self.over_budget(key, error.bytes, budget, room)
        else:
            logger.debug("Resolute: the capture of %s failed", key.shape, exc_info=error)
            passes = is_out_of_memory(error) or is_out_of_memory(error.__cause__)
            self._refuse(key, BypassReason(BypassCode.CAPTURE_FAILED, str(error)), passes)

    def replay_failed(self, key: CaptureKey, error: Exception) -> None:
        detail = f"the replay of {key.shape} failed: {first_line(error)}"
        self._refuse(key, BypassReason(BypassCode.CAPTURE_FAILED, detail))

    def out_of_memory(self, key: CaptureKey) -> None:
        """A call or its replay found no memory, and captures were freed for it."""
        detail = f"out of memory at {key.shape}; captures were freed"
        self._refuse(key, BypassReason(BypassCode.OUT_OF_MEMORY, detail), passes=True)

    def over_budget(self, key: CaptureKey, size: int, budget: int, room: int = 0) -> None:
        """room: bytes that it may work in; above the budget it is a share of the device, see `room_to_work_in`."""
        detail = f"a capture of {key.shape} takes {size >> 20} MiB, more than "
        if room > budget:
            detail += f"the {room >> 20} that it may work in on this device; use a smaller size or batch"
        else:
            detail += f"the budget has beside the captures in use; raise RESOLUTE_BUDGET_MB (now {budget >> 20})"
        self._refuse(key, BypassReason(BypassCode.OVER_BUDGET, detail), passes=True)

    def _refuse(self, key: CaptureKey, reason: BypassReason, passes: bool = False) -> None:
        """passes: the reason is a lack of memory."""
        if passes:
            self.backoff.add(key, reason)
        else:
            self._failed[key] = reason
        self.count(reason)

    def count(self, reason: BypassReason) -> None:
        """Count a bypass, and log the first of its kind."""
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)

    # --- told by what changed ----------------------------------------------------------------------------------

    def captured(self, key: CaptureKey) -> None:
        """A capture of the call was made."""
        self.gpu_bound.remove(key)

    def memory_was_freed(self) -> None:
        """Captures were closed: try again what there was no memory for."""
        self.backoff.clear()

    def retry_all(self, measured: bool) -> None:
        """Let every call be captured again. measured: also those that gained nothing from it."""
        self._failed.clear()
        self._needed.clear()
        self._short.clear()
        self.backoff.clear()
        if measured:
            self.gpu_bound.measure_again()

    def forget(self, owner: int) -> None:
        """A module was garbage collected."""
        self._failed = {key: reason for key, reason in self._failed.items() if key.owner != owner}
        self._needed = {call: size for call, size in self._needed.items() if call.owner != owner}
        self._short = {call for call in self._short if call.owner != owner}
        self._worked_in = {call: size for call, size in self._worked_in.items() if call.owner != owner}
        self.backoff.forget(owner)
        self.gpu_bound.forget(owner)

    def drop_stale(self, owner: int, epoch: int) -> None:
        """The module has other weights: what failed with the ones before may work."""
        current = (epoch, ANY_EPOCH)
        self._failed = {
            key: reason for key, reason in self._failed.items() if key.owner != owner or key.epoch in current
        }
