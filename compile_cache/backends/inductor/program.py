"""One module on the inductor backend: calls run through hooks and compiled regions, and on CUDA are captured whole."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...call_policy import Runs
from ...config import CacheConfig
from ...errors import BypassCode, BypassReason, DonatedInputsError, first_line
from ...keys import VAE_ROLES, GraphKey
from ...modules import gguf_loras
from ...modules.site import Hook, HookBuilder, installed
from ...store.artifact_store import ArtifactStore
from ...telemetry.stats import Stats
from ...torch_compat.out_of_memory import is_out_of_memory
from ..base import Call, Capabilities, CaptureFacts, Code, Graph, Program
from ..cuda_graphs.capture import Recorder
from .compiler.compile_queue import CompileQueue
from .regions.binding import RegionBinding
from .regions.miss_path import MOST_AT_ONCE, MOST_COMPARED, MissingCodes, MissPolicy
from .regions.table import RegionTable

logger = logging.getLogger(__name__)


class InductorProgram(Program):
    """One module on the inductor backend.

    store_for: returns the store of compiled regions for a device, or None. build_hooks: see `HookBuilder`.
    """

    def __init__(
        self,
        owner: int,
        capabilities: Capabilities,
        table: RegionTable,
        queue: CompileQueue,
        store_for: Callable[[torch.device], ArtifactStore | None],
        build_hooks: HookBuilder,
        stats: Stats,
        config: CacheConfig,
    ) -> None:
        super().__init__(owner, capabilities)
        self._stats = stats
        self._recorder = Recorder()
        self._bypassed: set[BypassReason] = set()
        self._lasting: frozenset[BypassReason] = frozenset()  # from building the hooks; reported for every call
        self._regions = RegionBinding(table, store_for, self._bypass, stats, config, queue)
        self._build_hooks = build_hooks
        self._hooks: Sequence[Hook] = ()
        self._epoch: int | None = None
        self._queue, self._config = queue, config
        self._missing: dict[GraphKey, MissingCodes] = {}  # by call: the regions whose original its latest `run` ran

    def code_of(self, key: GraphKey) -> Code:
        missing = self._missing.get(key)
        if not missing:
            return Code.READY
        left = [each for each in missing.values() if not each.is_settled]
        if not left:
            self._missing[key] = {}
            return Code.READY
        # A region that is neither compiled nor queued must be queued again; the comparing call does that too.
        came = sum(each.has_code or not self._queue.holds(each.region) for each in left)
        if came == len(left):
            return Code.READY if came <= MOST_AT_ONCE and all(each.has_code for each in left) else Code.UNVERIFIED
        return Code.UNVERIFIED if came >= MOST_COMPARED else Code.MISSING

    def has_run(self, key: GraphKey) -> bool:
        return key in self._missing

    @property
    def regions(self) -> tuple[int, int]:
        return self._regions.compiled_count

    @property
    def blocks(self) -> dict[str, int]:
        return dict(Counter(hook.origin for hook in self._hooks))

    @property
    def quantized(self) -> frozenset[tuple[str, str]]:
        return self._regions.quantized

    @property
    def region_keys(self) -> frozenset[str]:
        return self._regions.keys

    def run(self, call: Call) -> Any:
        result = self._run(call)
        self._missing[call.key] = self._regions.misses.missing if self.ran_originals else {}
        return result

    def compare(self, call: Call) -> Any:
        return self._run(call, self._missing.get(call.key))

    def _run(self, call: Call, kept: MissingCodes | None = None) -> Any:
        """Run the call. kept: regions that must run their original, even if they have code now."""
        self._bypassed.clear()
        self.ran_compiled = self.ran_originals = False
        if call.policy.runs is Runs.ORIGINALS:
            return call.invoke(call.tensors)
        self._survey(call.epoch)
        if not self._hooks:
            if not self._lasting:  # otherwise these reasons say why there is no hook
                self._bypass(BypassReason(BypassCode.NO_REGIONS, "the model has no block that Resolute knows"))
            return call.invoke(call.tensors)
        region_calls = self._stats.counters.region_calls
        result = self._again_if_short(call, kept)
        self.ran_compiled = self._stats.counters.region_calls > region_calls
        self.ran_originals = bool(self._regions.misses.missing)
        if not self._regions.was_reached and not self._bypassed:
            why = "no block of the model was called with inputs that Resolute knows"
            self._bypass(BypassReason(BypassCode.NO_REGIONS, why))
        return result

    def _again_if_short(self, call: Call, kept: MissingCodes | None) -> Any:
        """Run the call. If memory runs out and LoRAs of GGUF weights hold some, free these and run it again."""
        try:
            return self._invoke(call, kept)
        except Exception as error:
            short = any(map(is_out_of_memory, (error, error.__cause__)))
            if not short or call.module is None or not gguf_loras.free_after_oom(call.module.parameters()):
                raise
        logger.info("Resolute: out of memory; what only compiled code needs goes, and the call is made once more")
        torch.cuda.empty_cache()
        return self._invoke(call, kept)

    def _invoke(self, call: Call, kept: MissingCodes | None) -> Any:
        """Run the call through its regions; twice if it must wait for code that several workers compile.

        Only a run of the call shows which regions lack code, and for which inputs. So the first run queues all of them,
        like a run that does not wait, and the workers compile them in parallel.
        """
        queue, miss_policy = self._queue, MissPolicy.DEFER
        queue.begin(self._config, call.key.role in VAE_ROLES)
        with installed(self._hooks):
            if not call.background_compile or self._config.verify:
                miss_policy = MissPolicy.COMPILE
                # Another pack's patch inside the model may count its calls, so such a call runs once.
                if call.policy.is_repeatable and queue.workers_for(call.tensors[0].device) > 1:
                    result = self._run_first(call)
                    if not self._regions.misses.missing:
                        return result
                    del result  # frees a decoded image's memory for the second run
            finishes = self.has_run(call.key) and self.code_of(call.key) is Code.READY
            most = MOST_AT_ONCE if finishes else MOST_COMPARED
            self._regions.begin(call.progress, call.torch_flags, miss_policy, kept, most, call.policy.may_capture)
            return self._run_regions(call)

    def _run_first(self, call: Call) -> Any:
        """Run the call, and wait until the regions it queued are compiled. If any were, the call must run again."""
        started, stalled = self._stats.clock(), self._stats.waiting_seconds()
        region_calls = self._stats.counters.region_calls
        self._regions.begin(call.progress, call.torch_flags, MissPolicy.DEFER_ALL)
        result = self._run_regions(call)
        if self._regions.misses.missing:
            self._stats.counters.region_calls = region_calls  # only the second run's calls count
            self._stats.waited_since(started, stalled, "compile", "for all regions of the call")
            left = [key for key, _ in self._regions.misses.missing]
            self._queue.finish(left, call.progress, self._regions.announce)
        return result

    @staticmethod
    def _run_regions(call: Call) -> Any:
        """Run the call. If compiled code fails after consuming its inputs, repeat the call, which recreates them. The
        loop ends, because each failure refuses one more region.
        """
        while True:
            try:
                return call.invoke(call.tensors)
            except DonatedInputsError as error:
                logger.info("Resolute: %s; the call is made once more", error)

    def _survey(self, epoch: int) -> None:
        """Rebuild the hooks if the weights epoch changed, because another pack may have replaced a block."""
        if epoch == self._epoch:
            for reason in self._lasting:
                self._bypass(reason)
            return
        try:
            hooks = self._build_hooks(self._regions.run, self._bypass)
            self._regions.survey(hooks)
        except Exception as error:
            logger.warning("Resolute: the blocks of the model cannot be read; it runs eagerly", exc_info=error)
            self._bypass(BypassReason(BypassCode.NO_REGIONS, f"its blocks cannot be read: {first_line(error)}"))
            hooks = ()
        self._hooks = hooks
        self._lasting = frozenset(self._bypassed)
        self._epoch = epoch

    def close(self) -> None:
        self._hooks = ()
        self._epoch = None
        self._regions.survey(())

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> Graph:
        """See `Program.capture`. If no compiled code ran, capture the unmodified forward, without hooks."""
        misses = self._regions.misses
        misses.repeat()
        variant = frozenset(misses.missing) if self.ran_compiled else None
        with installed(self._hooks if self.ran_compiled else ()):
            return self._recorder.capture(call, result, facts, variant)

    def _bypass(self, reason: BypassReason) -> None:
        # Report each reason once per call: a model has seventy blocks, and one patch may affect all of them.
        if reason in self._bypassed:
            return
        self._bypassed.add(reason)
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)
