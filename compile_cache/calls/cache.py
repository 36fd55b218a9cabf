"""GraphCache: the one cache of a process. Every compiled call goes through `run`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from ..backends.base import Call, Program
from ..backends.cuda_graphs.run_cost import cost_of_run
from ..captures.attempts import NOT_RESIDENT, CaptureAttempts
from ..captures.captures import Captures, Entry, Reach, capture_key, free_bytes
from ..choices.whole_calls import WholeCalls
from ..config import CacheConfig
from ..errors import BypassCode, BypassReason
from ..keys import CaptureKey
from ..stats import Stats
from ..store.shape_history import ShapeHistory
from ..torch_facts.out_of_memory import is_out_of_memory
from .misses import FIRST, FREED, SeenSignatures, explain_first

logger = logging.getLogger(__name__)


class Action(Enum):
    REPLAY = "replay"  # there is a capture of this signature
    CAPTURE = "capture"  # run through the compiled regions, then capture
    REGIONS = "regions"  # run through the compiled regions, without a capture
    EAGER = "eager"  # run the original forward


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A call with what was decided for it and, for a replay, what came of launching it."""

    call: Call
    key: CaptureKey
    action: Action
    reason: BypassReason | None
    output: Any = None
    failure: Exception | None = None


class GraphCache:
    """Answers the calls of compiled modules, and counts what it did.

    One lock guards every capture and replay, because captures share memory. ComfyUI samples on one thread; with several
    GPUs, a second one waits here for a launch or for a check of a model. reach: see `CaptureAttempts`.
    """

    def __init__(self, config: CacheConfig | None = None, reach: Reach = free_bytes) -> None:
        self.config = config or CacheConfig.from_environment()
        self.stats = Stats()
        self._captures = Captures(self.config.budget_bytes)
        self.bytes_by_device = self._captures.held_by_device
        self._seen = SeenSignatures()
        folder = self.config.store_folder
        self.shapes = ShapeHistory(folder / "shapes" if folder and self.config.remember else None)
        self._attempts = CaptureAttempts(self._captures, self.stats, self.config, reach)
        self.whole_calls = WholeCalls(self.stats, folder and folder / "calls", self.config.source)
        self.after_capture: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def run(self, program: Program, call: Call, recheck: Callable[[], Call] | None = None) -> Any:
        """Answer a call by the fastest right path. Raises only what the original forward raises.

        recheck: looks closely at the module and returns the call as it is now: `call` itself if nothing changed. It is
        called once, after a replay was launched, so that the look overlaps with the GPU's work, or before anything else
        runs. If it returns another call, the replay's output is dropped and that call is answered.
        """
        timed = capture_key(program, call) if call.is_timed else None
        with self._lock, self.whole_calls.timed(timed, call.is_compared, program.waits, call.is_streamed):
            begun = self._begin(program, call)
            if recheck is not None and (call_now := recheck()) is not call:
                begun = self._begin(program, call_now)
            result = self._finish(program, begun)
            self._captures.keep_to_budget()
            return result

    def _begin(self, program: Program, call: Call) -> _Begun:
        """Decide what happens to a call. A replay is launched at once; nothing else runs, and nothing is counted."""
        key = capture_key(program, call)
        if program.capabilities.reads_live_weights:
            self._captures.drop_unrefreshable(key.owner, call.epoch)
        action, reason = self._decide(program, call, key, call.capture_blocker)
        if action is not Action.REPLAY:
            return _Begun(call, key, action, reason)
        if not call.weights.pin():
            self._attempts.not_resident(key, call.weights.bytes)
            return _Begun(call, key, *self._decide(program, call, key, NOT_RESIDENT))
        try:
            return _Begun(call, key, action, reason, *self._replay(key, call.tensors))
        finally:
            call.weights.unpin()

    def _decide(
        self, program: Program, call: Call, key: CaptureKey, blocker: BypassReason | None
    ) -> tuple[Action, BypassReason | None]:
        """The fastest correct path, and why it is slower than it might be. blocker: why the call is not captured."""
        bypass = call.forward_bypass or self.whole_calls.reason(key, call.is_compared, call.is_streamed)
        if bypass is not None:
            return Action.EAGER, bypass
        uncaptured = Action.REGIONS if program.capabilities.compiles else Action.EAGER
        may_capture = self.config.capture and call.may_capture and not self._attempts.gains_nothing(key)
        if not (program.capabilities.captures and may_capture):
            return uncaptured, None
        reason = blocker or self._attempts.reason(key)
        if reason is None and key in self._captures:
            return Action.REPLAY, None
        if self._attempts.is_measured_first(call, key):
            return Action.EAGER, None
        return (Action.CAPTURE, None) if reason is None else (uncaptured, reason)

    def _replay(self, key: CaptureKey, tensors: Sequence[torch.Tensor]) -> tuple[Any, Exception | None]:
        """Launch the replay of a capture: its output, or the error if that failed."""
        graph = self._captures.get(key)
        assert graph is not None, "the decision saw it under the same lock"
        try:
            return graph.replay(tensors), None
        except Exception as error:  # noqa: BLE001 (`_finish` runs the original, and says why)
            return None, error.with_traceback(None)  # its frames hold copies of outputs

    def _finish(self, program: Program, begun: _Begun) -> Any:
        """Do what was decided, and count it."""
        call, key, action, reason = begun.call, begun.key, begun.action, begun.reason
        if reason is not None:
            self._attempts.count(reason)
        if begun.failure is not None:
            return self._answer_failed_replay(call, key, begun.failure)
        if action is Action.REPLAY:
            self._captures.pin_for_session(key)
            self.stats.counters.replays += 1
            self.shapes.record(call.key, program, flags=key.torch_flags)
            return begun.output
        difference = self._record_signature(program, key)
        with ExitStack() as held:
            is_left_alone = reason is not None and reason.code is BypassCode.NOT_FASTER and not call.is_compared
            is_short = reason is NOT_RESIDENT or (action is Action.EAGER and not is_left_alone)
            pinned = not is_short and self._hold_weights(call, key, action, held)
            if action is Action.CAPTURE and not pinned:
                self._attempts.count(NOT_RESIDENT)
                action, _ = self._decide(program, call, key, NOT_RESIDENT)
            try:
                result, seconds = self._run_program(program, call, key, action, difference)
                out_of_memory = False
            except RuntimeError as error:
                # Without pinned weights, core makes room by unloading some in the middle of a call.
                out_of_memory = is_out_of_memory(error) and (self._free_captures() or (pinned and call.weights.pages))
                if not out_of_memory:
                    raise
        if out_of_memory:  # not in the handler: the error's frames hold tensors until it ends
            return self._answer_out_of_memory(call, key)
        if action is not Action.EAGER and call.capture_blocker is None:  # also where a cancelled call was the first one
            self.shapes.record(call.key, program, seconds, key.torch_flags)
        return result

    def _hold_weights(self, call: Call, key: CaptureKey, action: Action, held: ExitStack) -> bool:
        """Pin the weights and put them in place until `held` is closed. Returns whether there is room for that."""
        weights = call.weights
        if weights.pages and not self._attempts.may_bring_in(key, weights.bytes, action is Action.CAPTURE):
            return False
        if not weights.pin():
            self._attempts.not_resident(key, weights.bytes)
            return False
        held.callback(weights.unpin)
        held.enter_context(weights.in_place())
        return True

    def _run_program(
        self, program: Program, call: Call, key: CaptureKey, action: Action, difference: str | None
    ) -> tuple[Any, float]:
        """Run the original, or the regions and then perhaps capture. Returns the result and the capture's seconds."""
        if action is Action.EAGER:
            with self._attempts.measured(call, key):
                return self._run_original(call), 0.0
        started = self.stats.clock()
        if action is Action.REGIONS:
            with self._attempts.measured(call, key):
                result = program.run(call)
            self.stats.forward_ran(program.ran_compiled, program.waits, started)
            return result, 0.0
        with cost_of_run(call.device) as cost:
            result = program.run(call)
        ran_compiled = program.ran_compiled
        if program.waits:  # a capture would keep what is slow
            self.stats.forward_ran(ran_compiled, waits=True, started=started)
            return result, 0.0
        with self.stats.stalling("capture"):  # also for a capture that fails, after its rehearsal
            seconds = self._attempts.capture(program, call, key, result, difference or call.why_captured or FREED, cost)
        is_captured = key in self._captures
        self.stats.forward_ran(ran_compiled or is_captured)
        if is_captured:
            self.after_capture()
            self._captures.pin_for_session(key)
        return result, seconds

    def _record_signature(self, program: Program, key: CaptureKey) -> str | None:
        """Name the difference from the nearest signature seen before, as an event too; None if it was seen before."""
        exact = key if program.capabilities.captures else replace(key, epoch=0)  # without, no weight's address counts
        difference = self._seen.add(key.owner, exact, exact.components())
        if difference == FIRST:
            difference = explain_first(self.shapes.of_model(key.graph.model), key.torch_flags)
        if difference is not None:
            self.stats.counters.signatures += 1
            self.stats.event("signature", f"{key.graph.role.value} {key.shape}: {difference}")
        return difference

    def _free_captures(self) -> bool:
        """Free the captures that no session uses. Returns whether that gave any memory back."""
        freed = self._captures.trim(0)
        self.stats.counters.evictions = self._captures.evictions
        torch.cuda.empty_cache()
        return freed > 0

    def _answer_failed_replay(self, call: Call, key: CaptureKey, failure: Exception) -> Any:
        """A replay failed: its capture goes, and the original forward answers."""
        if is_out_of_memory(failure):
            self._free_captures()
            return self._answer_out_of_memory(call, key)
        logger.warning("Resolute: a replay failed; the original runs", exc_info=failure)
        self._captures.discard(key)
        self._attempts.replay_failed(key, failure)
        return self._run_original(call)

    def _answer_out_of_memory(self, call: Call, key: CaptureKey) -> Any:
        call.weights.ran_out()
        self._attempts.out_of_memory(key)
        return self._run_original(call)

    def _run_original(self, call: Call) -> Any:
        result = call.invoke(call.tensors)
        self.stats.forward_ran(compiled=False)
        return result

    def open_session(self, owner: int) -> None:
        """A sampling run of a module starts: the captures that it uses stay until it ends."""
        with self._lock:
            self._captures.open_session(owner)

    def close_session(self, owner: int) -> None:
        """The sampling run is over. If captures hold more than the budget now, release what they only work in."""
        with self._lock:
            self._captures.close_session(owner)
            self._captures.keep_to_budget()

    def captures_of(self, owner: int) -> int:
        """How many captures a module has."""
        return sum(key.owner == owner for key, _ in self._captures)

    @property
    def bytes(self) -> int:  # that captures hold
        return self._captures.held_bytes

    def give_back(self, everything: bool) -> int:
        """The application needs memory, with `everything` because it unloads all models. See `Captures.give_back`."""
        with self._lock:
            freed = self._captures.give_back(everything)
            if everything:
                self._attempts.memory_was_freed()
            self.stats.counters.evictions = self._captures.evictions
            return freed

    def trim(self, bytes_to_free: int | None = None) -> int:
        """Free captures that no session uses, oldest first; all of them by default. Returns the bytes freed."""
        with self._lock:
            freed = self._captures.free(bytes_to_free)
            self._attempts.retry_all(measured=bytes_to_free is None)
            self.stats.counters.evictions = self._captures.evictions
            return freed

    def forget(self, owner: int) -> None:
        """Drop everything of a module that was garbage collected, and give its memory back."""
        with self._lock:
            self._seen.forget(owner)
            had = self.captures_of(owner)
            self._captures.forget(owner)
            self._attempts.forget(owner)
            if had:
                self._captures.released()
                self._attempts.memory_was_freed()

    def drop_stale(self, owner: int, epoch: int) -> None:
        """Drop a module's captures from before its weights epoch `epoch`."""
        with self._lock:
            self._captures.drop_stale(owner, epoch)

    def captured(self) -> list[tuple[CaptureKey, Entry]]:
        """Every capture that there is now, the least recently used first."""
        return list(self._captures)

    def report(self) -> dict[str, Any]:
        """Plain data for `GET /resolute/cache` and the report node. Never waits for a call that is running."""
        return {"counters": self.stats.snapshot(), **self._captures.report(self.shapes.size_of)}
