"""GraphCache: the one cache of a process. Every compiled call goes through `run`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from ..backends.base import Call, Code, Program
from ..call_policy import Runs
from ..config import CacheConfig
from ..errors import BypassReason
from ..keys import VAE_ROLES, CaptureKey, Tier
from ..telemetry.reasons import FIRST, FREED, explain_first
from ..torch_compat.out_of_memory import is_out_of_memory
from ..tuning.stopwatch import cost_of_run, stopwatch_on
from .cache_memory import CacheMemory
from .capture_policy import NOT_RESIDENT
from .captures import Reach, capture_key, free_bytes
from .tiers import Tiers

logger = logging.getLogger(__name__)


class Action(Enum):
    REPLAY = "replay"  # there is a capture of this signature
    CAPTURE = "capture"  # run through the compiled regions, then capture
    COMPARE = "compare"  # there is a capture of originals, and code to compare: run once without the replay
    REGIONS = "regions"  # run through the compiled regions, without a capture
    EAGER = "eager"  # run the original forward


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A call, the decision about it and, for a replay, the result of its launch."""

    call: Call
    key: CaptureKey
    action: Action
    reason: BypassReason | None
    output: Any = None
    failure: Exception | None = None


class GraphCache(CacheMemory):
    """Answers the calls of compiled modules, and counts its work.

    One lock guards every capture and replay, because captures share memory. ComfyUI samples on one thread; with several
    GPUs, a second thread waits here for a launch or a check of a model. reach: see `CapturePolicy`.
    """

    def __init__(self, config: CacheConfig | None = None, reach: Reach = free_bytes) -> None:
        super().__init__(config or CacheConfig.from_environment(), reach)
        self._tiers = Tiers(self._captures, lambda key: self.compiled_vs_eager.reason(key, in_turn=False) is not None)
        self.after_capture: Callable[[], None] = lambda: None

    def run(self, program: Program, call: Call, recheck: Callable[[], Call] | None = None) -> Any:
        """Answer a call by the fastest correct path. Raises only the errors of the original forward.

        recheck: inspects the module and returns the current call: `call` itself if nothing changed. It is called once:
        right after a replay's launch, so that it overlaps with the GPU's work, else before anything runs. If it
        returns another call, the replay's output is dropped and that call is answered.
        """
        key = capture_key(program, call)
        waits = program.code_of(call.key) is not Code.READY
        timed = key if call.is_timed else None
        with self._lock, self.compiled_vs_eager.timed(timed, call.benchmark_eager, waits, call.policy.is_streamed):
            if call.begins_run:
                self._tiers.begin_run(program)
            # At the start of a run, the inspection of all modules keeps the host busy.
            with self.stats.host.claimed() if call.begins_run else nullcontext():
                begun = self._begin(program, call, key)
                if recheck is not None and (call_now := recheck()) is not call:
                    self.compiled_vs_eager.replays_nothing()
                    begun = self._begin(program, call_now, capture_key(program, call_now))
            result = self._finish(program, begun)
            self._captures.keep_to_budget()
            return result

    def _begin(self, program: Program, call: Call, key: CaptureKey) -> _Begun:
        """Decide the path of a call. A replay is launched at once; nothing else runs, and nothing is counted.

        key: see `capture_key`.
        """
        if program.capabilities.keeps_graphs:
            self._captures.drop_stale(key.owner, call.epoch)
        policy = call.policy
        slower = (
            None if policy.is_eager else self.compiled_vs_eager.reason(key, call.benchmark_eager, policy.is_streamed)
        )
        if slower is not None:
            if call.benchmark_eager:
                return _Begun(call, key, Action.EAGER, slower)
            call = replace(call, policy=policy.originals())
        key = self._tiers.key_of(program, call, key)
        action, reason = self._decide(program, call, key)
        if action is not Action.REPLAY:
            return _Begun(call, key, action, reason or slower)
        if not call.weights.pin():
            self._capture_policy.not_resident(key, call.weights.bytes)
            return _Begun(call, key, *self._decide(program, call, key, NOT_RESIDENT))
        try:
            return _Begun(call, key, action, slower, *self._replay(key, call.tensors))
        finally:
            call.weights.unpin()

    def _decide(
        self, program: Program, call: Call, key: CaptureKey, short: BypassReason | None = None
    ) -> tuple[Action, BypassReason | None]:
        """Return the fastest correct path, and why it is not a faster one. short: the reason if weights did not fit."""
        policy = call.policy
        if policy.is_eager:
            return Action.EAGER, policy.reason
        uncaptured = Action.REGIONS if program.capabilities.compiles and policy.runs is Runs.CODE else Action.EAGER
        captures = self.config.capture and program.capabilities.captures and not self._capture_policy.gains_nothing(key)
        if not captures or not (policy.may_capture or policy.reason):
            return uncaptured, None
        reason = policy.reason or short or self._capture_policy.reason(key)
        if reason is None and key in self._captures:
            return (Action.COMPARE if self._tiers.compares(key) else Action.REPLAY), None
        if self._capture_policy.needs_trial_run(call, key):
            return Action.EAGER, None
        return (Action.CAPTURE, None) if reason is None else (uncaptured, reason)

    def _replay(self, key: CaptureKey, tensors: Sequence[torch.Tensor]) -> tuple[Any, Exception | None]:
        """Launch the replay of a capture. Returns its output, or the error if the launch failed."""
        entry = self._captures.get(key)
        assert entry is not None, "the decision saw it under the same lock"
        if key.tier is Tier.ORIGINAL:
            self.compiled_vs_eager.replays_originals(entry.is_mixed)
        watch = stopwatch_on(torch.device(key.device)) if entry.watch is None else None
        try:
            output = entry.value.replay(tensors)
            if watch is not None:
                watch.stop()
                entry.watch = watch
            return output, None
        except Exception as error:  # noqa: BLE001 (`_finish` runs the original, and says why)
            return None, error.with_traceback(None)  # its frames hold copies of outputs

    def _finish(self, program: Program, begun: _Begun) -> Any:
        """Carry out the decision, and count it."""
        call, key, action, reason = begun.call, begun.key, begun.action, begun.reason
        if reason is not None:
            self._capture_policy.count(reason)
        if begun.failure is not None:
            return self._answer_failed_replay(call, key, begun.failure)
        if action is Action.REPLAY:
            self._captures.pin_for_session(key)
            self.stats.counters.replays += 1
            self.stats.counters.original_replays += key.tier is Tier.ORIGINAL
            self.stats.host.record_call(0.0)
            self._remember(call, program, key)
            return begun.output
        difference = self._record_signature(program, key)
        with ExitStack() as held:
            is_short = reason is NOT_RESIDENT or (action is Action.EAGER and call.policy.runs is not Runs.ORIGINALS)
            pinned = not is_short and self._hold_weights(call, key, action, held)
            if action is Action.CAPTURE and not pinned:
                self._capture_policy.count(NOT_RESIDENT)
                action, _ = self._decide(program, call, key, NOT_RESIDENT)
            try:
                result, seconds = self._run_program(program, call, key, action, difference)
                out_of_memory = False
            except RuntimeError as error:
                # If weights are not pinned, core makes room by unloading some in the middle of a call.
                out_of_memory = is_out_of_memory(error) and (self._free_captures() or (pinned and call.weights.pages))
                if not out_of_memory:
                    raise
        if out_of_memory:  # not in the handler: the error's frames hold tensors until it ends
            return self._answer_out_of_memory(call, key)
        if action is not Action.EAGER and call.policy.is_repeatable:  # also if the first call was cancelled
            self._remember(call, program, key, seconds)
        return result

    def _remember(self, call: Call, program: Program, key: CaptureKey, seconds: float = 0.0) -> None:
        """Record the call's shape, but not of a program that substitutes for another one and has no regions."""
        if program.region_keys or not program.ran_originals:
            self.shapes.record(call.key, program, seconds, key.torch_flags)

    def _hold_weights(self, call: Call, key: CaptureKey, action: Action, held: ExitStack) -> bool:
        """Pin the weights and put them in place until `held` is closed. Returns False if there is no room for them."""
        weights = call.weights
        if weights.pages and not self._capture_policy.may_load(key, weights.bytes, action is Action.CAPTURE):
            return False
        if not weights.pin():
            self._capture_policy.not_resident(key, weights.bytes)
            return False
        held.callback(weights.unpin)
        held.enter_context(weights.in_place())
        return True

    def _run_program(
        self, program: Program, call: Call, key: CaptureKey, action: Action, difference: str | None
    ) -> tuple[Any, float]:
        """Run the original, or the regions and then perhaps capture. Returns the result and the capture's seconds."""
        if action is Action.EAGER:
            with self._capture_policy.measured(call, key):
                return self._run_original(call), 0.0
        started = self.stats.clock()
        if action is Action.CAPTURE:
            with self.stats.host.claimed():  # the run, rehearsal and capture must decide alike, and are timed
                return self._run_and_capture(program, call, key, difference, started)
        if action is Action.COMPARE:
            self._tiers.compared(key)
            with self.stats.host.claimed():
                result = program.compare(call)
        else:
            with self._capture_policy.measured(call, key):
                result = program.run(call)
            self.stats.host.record_call(self._capture_policy.host_share(key))
        self.stats.forward_ran(program.ran_compiled, program.ran_originals, started)
        return result, 0.0

    def _run_and_capture(
        self, program: Program, call: Call, key: CaptureKey, difference: str | None, started: float
    ) -> tuple[Any, float]:
        """Returns the result and the capture's seconds. If the run lacks code, the capture is of the first tier."""
        with cost_of_run(call.device) as cost:
            result = program.run(call)
        ran_compiled, ran_originals = program.ran_compiled, program.ran_originals
        ran, seconds = self._tiers.key_that_ran(program, call, key), 0.0
        # A VAE's call needs much memory, and a run that leaves regions to be compiled does not show the host's share of
        # the time: the next run does.
        is_first = ran_originals and difference is not None and key.graph.role in VAE_ROLES
        may_capture = ran == key or not (self._capture_policy.gains_nothing(ran) or self._capture_policy.reason(ran))
        if may_capture and not is_first and ran not in self._captures:
            why = difference or call.why_captured or self._tiers.why(ran) or FREED
            with self.stats.stalling("capture"):  # also for a capture that fails, after its rehearsal
                seconds = self._capture_policy.capture(program, call, ran, result, why, cost)
        is_captured = ran in self._captures
        self.stats.forward_ran(ran_compiled or is_captured, ran_originals, started)
        if is_captured:
            self._tiers.captured(call, ran)
            self.after_capture()
            self._captures.pin_for_session(ran)
        return result, seconds

    def _record_signature(self, program: Program, key: CaptureKey) -> str | None:
        """Record and return the difference from the nearest earlier signature; None if it was seen before."""
        exact = replace(key, tier=Tier.COMPILED)  # missing code shows only at run time
        if not program.capabilities.captures:
            exact = replace(exact, epoch=0)  # without captures, the addresses of weights do not matter
        difference = self._seen.add(key.owner, exact, exact.components())
        if difference == FIRST:
            difference = explain_first(self.shapes.of_model(key.graph.model), key.torch_flags)
        if difference is not None:
            self.stats.counters.signatures += 1
            self.stats.event("signature", f"{key.graph.role.value} {key.shape}: {difference}")
        return difference

    def _free_captures(self) -> bool:
        """Free the captures that no session uses. Returns True if that freed any memory."""
        freed = self._captures.trim(0)
        self.stats.counters.evictions = self._captures.evictions
        torch.cuda.empty_cache()
        return freed > 0

    def _answer_failed_replay(self, call: Call, key: CaptureKey, failure: Exception) -> Any:
        """Answer a call whose replay failed by the original forward. Its capture is dropped, unless memory ran out."""
        if is_out_of_memory(failure):
            self._free_captures()
            return self._answer_out_of_memory(call, key)
        logger.warning("Resolute: a replay failed; the original runs", exc_info=failure)
        self._captures.discard(key)
        self._capture_policy.replay_failed(key, failure)
        return self._run_original(call)

    def _answer_out_of_memory(self, call: Call, key: CaptureKey) -> Any:
        call.weights.ran_out()
        self._capture_policy.out_of_memory(key)
        return self._run_original(call)

    def _run_original(self, call: Call) -> Any:
        result = call.invoke(call.tensors)
        self.stats.forward_ran(compiled=False)
        return result
