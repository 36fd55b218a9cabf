"""Which calls are captured. Only this module makes captures, and keeps and words the reasons why one is not made.

Three refusals arise elsewhere: `Program.capture` finds no room or no gain, `Weights.pin` absent weights. The
reasons from outside the cache come with the call, in `Call.policy`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.base import Call, CaptureFacts, Program
from ..backends.cuda_graphs.memory import release_graph_memory, room_for
from ..config import CacheConfig
from ..errors import BypassCode, BypassReason, NoGainError, OverBudgetError, first_line
from ..keys import CaptureKey, digest
from ..telemetry.stats import Stats
from ..torch_compat.out_of_memory import is_out_of_memory
from ..torch_compat.private_names import pytree
from ..tuning.machine import host, machine_of
from ..tuning.stopwatch import RunCost, cost_of_run
from ..tuning.tuner import Tuner
from .captures import Captures, Reach, free_bytes

logger = logging.getLogger(__name__)

NOT_RESIDENT = BypassReason(
    BypassCode.STREAMED_WEIGHTS, "the weights do not all fit into free memory, so blocks get theirs one by one"
)
LEAST_HOST_SHARE = 0.5  # below it the host is far ahead of the GPU: a capture gains less than 3 percent
_GAIN_SECONDS = 7 * 24 * 3600.0  # until the gain is measured again: another program may have kept the GPU busy
_CHECK_SECONDS = 1.0  # between two checks of the device's memory
_RETRY_SECONDS = 300.0  # until a capture that ran out of memory is retried, however much is free
_MORE = 256 << 20  # bytes: an earlier retry needs this much more within reach
_AMPLE = 8 << 30  # bytes: if this much is free beside the weights, a call's own memory is not measured first
_MOST_CALLS = 4096  # states that are kept


@dataclass(slots=True)
class CallState:
    """The state of one call's captures.

    Out of memory is temporary and applies to every weights epoch, because each load needs as much. Any other failure is
    permanent for its weights epoch. Times are of the monotonic clock.
    """

    reason: BypassReason | None = None  # why it is not captured
    epoch: int | None = None  # the weights epoch of a permanent reason; None: memory is short
    reach: int = 0  # bytes that were within reach when the reason arose
    check_at: float = 0.0
    retry_at: float = 0.0
    unexpected_out_of_memory: bool = False  # the weights did not fit once, though there seemed to be room
    peak_bytes: int = 0  # peak bytes that a run of the call allocated
    needed: int = 0  # workspace bytes of a refused capture
    name: str = ""  # its key among the calls that gain nothing: a digest of graph, torch flags and tier
    host_share: float | None = None  # of a run that gained nothing, if this process measured it


class CapturePolicy:
    """Puts captures into `captures`, or refuses them with a reason. GraphCache's lock guards it."""

    def __init__(self, captures: Captures, stats: Stats, config: CacheConfig, reach: Reach = free_bytes) -> None:
        """reach: see `free_bytes`, plus the bytes of weights that could be unloaded. Free memory alone grows as soon as
        another model evicts weights, but the next capture needs these weights again.
        """
        self._captures, self._stats, self._spare, self._reach = captures, stats, config.spare_bytes, reach
        self._states: dict[CaptureKey, CallState] = {}  # by `of_any_epoch`
        folder = config.store_folder if config.remember else None
        self._gpu_bound = Tuner[str, float](
            "calls that gain nothing from a capture", str, float, folder and folder / "captures",
            lambda device: (*machine_of(device), *host(), config.source, config.application, str(LEAST_HOST_SHARE)),
        )  # fmt: skip

    def _state(self, key: CaptureKey) -> CallState:
        call = key.of_any_epoch
        state = self._states.get(call)
        if state is None:
            if len(self._states) >= _MOST_CALLS:
                del self._states[next(iter(self._states))]
            state = self._states[call] = CallState()
        return state

    # --- queries before a call ---------------------------------------------------------------------------------

    def reason(self, key: CaptureKey) -> BypassReason | None:
        """Return why a call is not captured now; None if no reason is known."""
        state = self._states.get(key.of_any_epoch) if self._states else None
        if state is None or state.reason is None or state.epoch not in (None, key.epoch):
            return None
        if state.epoch is None and (now := time.monotonic()) >= state.check_at:
            state.check_at = now + _CHECK_SECONDS
            if now >= state.retry_at or self._reach(key.device) >= state.reach + _MORE:
                state.reason = None
        return state.reason

    def gains_nothing(self, key: CaptureKey) -> bool:
        """True if the GPU is busy all the time even without a capture of this call: this or an earlier process on this
        machine measured so less than a week ago. That is no bypass.
        """
        if self._gpu_bound.is_empty(key.device):
            return False
        state = self._state(key)
        is_first = not state.name
        measured = self._gpu_bound.get(key.device, _name(state, key))
        is_known = measured is not None and 0 <= time.time() - measured < _GAIN_SECONDS  # clocks may be set back
        if is_known and is_first:
            logger.info("Resolute: %s is not captured, since that gained nothing when it was measured", key.shape)
        return is_known

    def host_share(self, key: CaptureKey) -> float | None:
        """Return the share of a call's time that keeps the host busy; None if it is unknown, or all of the time."""
        known = self.gains_nothing(key)
        return (self._state(key).host_share or LEAST_HOST_SHARE) if known else None

    def may_load(self, key: CaptureKey, pages: int, to_capture: bool) -> bool:
        """True if all weights of a call, `pages` bytes, should be loaded, which may evict other models' weights."""
        reason = self.reason(key)
        if reason is not None and reason.code in (BypassCode.OUT_OF_MEMORY, BypassCode.STREAMED_WEIGHTS):
            return False
        if to_capture and not self._fits(key, pages):
            self.not_resident(key, pages)
            return False
        return True

    def _fits(self, key: CaptureKey, pages: int) -> bool:
        """True if `pages` bytes of weights fit beside the memory that a capture of the call needs, as far as known."""
        reach = self._reach(key.device)
        return not reach or reach >= pages + room_for(self._state(key).peak_bytes) + self._spare

    def needs_trial_run(self, call: Call, key: CaptureKey) -> bool:
        """True if pinned pages might leave the call too little memory: it first runs once eagerly, to measure it."""
        if not (call.background_compile and call.weights.pages) or self._state(key).peak_bytes:
            return False
        return 0 < self._reach(key.device) < call.weights.bytes + _AMPLE

    @contextmanager
    def measured(self, call: Call, key: CaptureKey) -> Iterator[None]:
        """Record the memory of a run without all pages. If it is less than known before, they may fit beside it now."""
        if not (call.background_compile and call.weights.pages):
            yield
            return
        with cost_of_run(call.device) as cost:
            yield
        state = self._state(key)
        if state.reason is NOT_RESIDENT and cost.bytes + _MORE <= state.peak_bytes:
            state.reason = None
        state.peak_bytes = max(cost.bytes, 1)

    # --- the capture -------------------------------------------------------------------------------------------

    def capture(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str, cost: RunCost) -> float:
        """Capture a call whose run returned `result`. cost: of that run. Returns the capture's seconds.

        Raises only cancellations.
        """
        started = self._stats.clock()
        captures, state = self._captures, self._state(key)
        state.peak_bytes = cost.bytes
        captures.drop_stale(key.owner, call.epoch)
        room = captures.room_to_work_in(_bytes_of(call, result), call.device)
        if state.needed > room:  # do not rehearse again
            self._over_budget(key, state.needed, room)
            return 0.0
        if call.weights.pages and not self._fits(key, call.weights.bytes):
            detail = f"beside the weights, too little memory is free for a capture of {key.shape}"
            self._refuse(key, BypassCode.CAPTURE_FAILED, detail, is_temporary=True)
            return 0.0
        shared = captures.shared_bytes()
        call.progress.raise_if_cancelled()
        try:
            facts = CaptureFacts(cost.bytes, room, self._spare, cost.host_share(), LEAST_HOST_SHARE)
            graph = program.capture(call, result, facts)
        except Exception as error:
            if isinstance(error.__cause__, call.progress.cancellations):
                raise error.__cause__ from None
            if isinstance(error, call.progress.cancellations):
                raise
            self._capture_failed(key, error, room)
            return 0.0
        seconds = self._stats.clock() - started
        grown = captures.shared_bytes()
        too_large = grown > max(captures.budget, shared)  # the pool grew by more than was measured
        mixed = program.ran_originals and program.ran_compiled
        if too_large or not captures.put(key, graph, graph.bytes, mixed):
            size = graph.bytes
            graph.close()
            release_graph_memory()
            self._over_budget(key, size + grown - shared)
        else:
            self._stats.counters.captures += 1
            self._stats.event("capture", f"{key.shape}: {why}", seconds)
        self._stats.counters.evictions = captures.evictions
        return seconds

    # --- reports of failures -----------------------------------------------------------------------------------

    def not_resident(self, key: CaptureKey, pages: int) -> None:
        """Record that the weights, `pages` bytes, did not or will not all fit. They are tried again when more memory is
        within reach; if there seemed to be enough memory, once more before that.
        """
        if not self._reach(key.device):
            return
        state = self._state(key)
        is_unexpected = self._fits(key, pages) and not state.unexpected_out_of_memory
        state.unexpected_out_of_memory = is_unexpected
        if not is_unexpected:
            self._wait_for_memory(key, NOT_RESIDENT)

    def replay_failed(self, key: CaptureKey, error: Exception) -> None:
        self._refuse(key, BypassCode.CAPTURE_FAILED, f"the replay of {key.shape} failed: {first_line(error)}")

    def out_of_memory(self, key: CaptureKey) -> None:
        """Record that a call or its replay ran out of memory, so that captures were freed."""
        detail = f"out of memory at {key.shape}; captures were freed"
        self._refuse(key, BypassCode.OUT_OF_MEMORY, detail, is_temporary=True)

    def _capture_failed(self, key: CaptureKey, error: Exception, room: int) -> None:
        """Record that `Program.capture` raised. room: see `_over_budget`."""
        if isinstance(error, NoGainError):
            self._state(key).host_share = error.host_share
            self._gpu_bound.set(key.device, _name(self._state(key), key), time.time())
            logger.info("Resolute: %s is not captured, since that would gain nothing: %s", key.shape, error)
        elif isinstance(error, OverBudgetError):
            self._state(key).needed = error.bytes
            self._over_budget(key, error.bytes, room)
        else:  # part of the graph may have been recorded
            release_graph_memory()
            logger.debug("Resolute: the capture of %s failed", key.shape, exc_info=error)
            is_temporary = is_out_of_memory(error) or is_out_of_memory(error.__cause__)
            self._refuse(key, BypassCode.CAPTURE_FAILED, first_line(error), is_temporary)

    def _over_budget(self, key: CaptureKey, size: int, room: int = 0) -> None:
        """room: bytes of its workspace; if above the budget, it is a share of the device, see `room_to_work_in`."""
        budget = self._captures.budget
        detail = f"a capture of {key.shape} takes {size >> 20} MiB, more than "
        if room > budget:
            detail += f"the {room >> 20} that it may work in on this device; use a smaller size or batch"
        else:
            detail += f"the budget has beside the captures in use; raise RESOLUTE_BUDGET_MB (now {budget >> 20})"
        self._refuse(key, BypassCode.OVER_BUDGET, detail, is_temporary=True)

    def _refuse(self, key: CaptureKey, code: BypassCode, detail: str, is_temporary: bool = False) -> None:
        """Record and count a refusal. is_temporary: memory is short."""
        reason = BypassReason(code, detail)
        if is_temporary:
            self._wait_for_memory(key, reason)
        else:
            state = self._state(key)
            state.reason, state.epoch = reason, key.epoch
        self.count(reason)

    def _wait_for_memory(self, key: CaptureKey, reason: BypassReason) -> None:
        state, now = self._state(key), time.monotonic()
        if state.reason is None or state.epoch != key.epoch:  # a permanent reason is not overwritten
            state.reason, state.epoch, state.reach = reason, None, self._reach(key.device)
            state.check_at, state.retry_at = now + _CHECK_SECONDS, now + _RETRY_SECONDS

    def count(self, reason: BypassReason) -> None:
        """Count a bypass, and log the first of its kind."""
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)

    # --- reports of changes ------------------------------------------------------------------------------------

    def memory_was_freed(self) -> None:
        """Captures were closed: retry the captures that lacked memory."""
        for state in self._states.values():
            if state.epoch is None:
                state.reason = None

    def retry_all(self, measured: bool) -> None:
        """Let every call be captured again. measured: also calls that gained nothing from a capture."""
        for state in self._states.values():
            state.reason, state.unexpected_out_of_memory, state.needed = None, False, 0
        if measured:
            self._gpu_bound.clear()

    def forget(self, owner: int) -> None:
        """Forget a garbage-collected module. Calls that gain nothing are kept for the next module of its structure."""
        self._states = {call: state for call, state in self._states.items() if call.owner != owner}


def _name(state: CallState, key: CaptureKey) -> str:
    if not state.name:
        state.name = digest((key.graph.digest(), key.torch_flags, int(key.tier)))
    return state.name


def _bytes_of(call: Call, result: Any) -> int:
    """Return the bytes of the buffers that a capture of this call will have."""
    leaves = (*call.tensors, *pytree.tree_leaves(result))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
