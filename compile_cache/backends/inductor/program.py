"""One module and its calls: through hooks, compiled regions, and on CUDA captures of the whole forward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...call_policy import Runs
from ...config import CacheConfig
from ...errors import BypassCode, BypassReason, InputsGoneError, first_line
from ...keys import VAE_ROLES, GraphKey
from ...regions import gguf_loras
from ...regions.site import Hook, HookBuilder, installed
from ...stats import Stats
from ...store.artifact_store import ArtifactStore
from ...torch_facts.out_of_memory import is_out_of_memory
from ..base import Call, Capabilities, CaptureFacts, Code, Graph, Program
from ..cuda_graphs.capture import Recorder
from .parallel.compile_queue import CompileQueue
from .regions.binding import RegionBinding
from .regions.miss_path import MOST_AT_ONCE, MOST_COMPARED, Lacks, Missing
from .regions.table import RegionTable

logger = logging.getLogger(__name__)


class InductorProgram(Program):
    """One module on the inductor backend.

    store_for: the store for compiled regions of a device, or None. build_hooks: see `HookBuilder`.
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
        self._lasting: frozenset[BypassReason] = frozenset()  # from building the hooks; they apply to every call
        self._regions = RegionBinding(table, store_for, self._bypass, stats, config, queue)
        self._build_hooks = build_hooks
        self._hooks: Sequence[Hook] = ()
        self._epoch: int | None = None
        self._queue, self._config = queue, config
        self._lacking: dict[GraphKey, Lacks] = {}  # by call: what its latest run ran originals of

    def code_of(self, key: GraphKey) -> Code:
        lacks = self._lacking.get(key)
        if not lacks:
            return Code.READY
        left = [lack for lack in lacks.values() if not lack.is_settled]
        if not left:
            self._lacking[key] = {}
            return Code.READY
        # What nobody makes any more has to be left again, which the comparing call does too.
        came = sum(each.has_come or not self._queue.holds(each.region) for each in left)
        if came == len(left):
            return Code.READY if came <= MOST_AT_ONCE and all(each.has_come for each in left) else Code.CAME
        return Code.CAME if came >= MOST_COMPARED else Code.COMING

    def has_run(self, key: GraphKey) -> bool:
        return key in self._lacking

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
        self._lacking[call.key] = self._regions.misses.lacks if self.ran_originals else {}
        return result

    def compare(self, call: Call) -> Any:
        return self._run(call, self._lacking.get(call.key))

    def _run(self, call: Call, kept: Lacks | None = None) -> Any:
        """kept: regions that run originals, though code may have come."""
        self._bypassed.clear()
        self.ran_compiled = self.ran_originals = False
        if call.policy.runs is Runs.ORIGINALS:
            return call.invoke(call.tensors)
        self._survey(call.epoch)
        if not self._hooks:
            if not self._lasting:  # else they say why there is none
                self._bypass(BypassReason(BypassCode.NO_REGIONS, "the model has no block that Resolute knows"))
            return call.invoke(call.tensors)
        region_calls = self._stats.counters.region_calls
        result = self._again_if_short(call, kept)
        self.ran_compiled = self._stats.counters.region_calls > region_calls
        self.ran_originals = bool(self._regions.misses.lacks)
        if not self._regions.was_reached and not self._bypassed:
            why = "no block of the model was called with inputs that Resolute knows"
            self._bypass(BypassReason(BypassCode.NO_REGIONS, why))
        return result

    def _again_if_short(self, call: Call, kept: Lacks | None) -> Any:
        """Answer the call. If memory runs out while LoRAs of GGUF weights hold some, let these go and do it again."""
        try:
            return self._invoke(call, kept)
        except Exception as error:
            short = any(map(is_out_of_memory, (error, error.__cause__)))
            if not short or call.module is None or not gguf_loras.give_up(call.module.parameters()):
                raise
        logger.info("Resolute: out of memory; what only compiled code needs goes, and the call is made once more")
        torch.cuda.empty_cache()
        return self._invoke(call, kept)

    def _invoke(self, call: Call, kept: Lacks | None) -> Any:
        """Run the call through its regions; twice, if it waits for those that several workers compile.

        Which regions lack code, and for which inputs, shows only when the call runs. So its first run leaves them to
        the queue, as each run does that waits for nothing.
        """
        queue, missing = self._queue, Missing.LEAVE
        queue.begin(self._config, call.key.role in VAE_ROLES)
        with installed(self._hooks):
            if not call.is_behind or self._config.verify:
                missing = Missing.COMPILE
                # A patch of another pack inside the model may count its calls, so such a call runs once.
                if call.policy.is_repeatable and queue.workers_for(call.tensors[0].device) > 1:
                    result = self._run_first(call)
                    if not self._regions.misses.lacks:
                        return result
                    del result  # a decoded image takes memory that the second run needs
            most = MOST_AT_ONCE if self.code_of(call.key) is Code.READY else MOST_COMPARED
            self._regions.begin(call.progress, call.torch_flags, missing, kept, most)
            return self._run_regions(call)

    def _run_first(self, call: Call) -> Any:
        """Run the call, and wait until what it left is compiled. It has to be made again if it left anything."""
        started, stalled = self._stats.clock(), self._stats.waiting_seconds()
        region_calls = self._stats.counters.region_calls
        self._regions.begin(call.progress, call.torch_flags, Missing.LEAVE_ALL)
        result = self._run_regions(call)
        if self._regions.misses.lacks:
            self._stats.counters.region_calls = region_calls  # those of the second run count
            self._stats.waited_since(started, stalled, "compile", "for all regions of the call")
            left = [key for key, _ in self._regions.misses.lacks]
            self._queue.finish(left, call.progress, self._regions.announce)
        return result

    @staticmethod
    def _run_regions(call: Call) -> Any:
        """Run the call; again, where compiled code failed without its inputs: the call makes them anew, and each time
        one more region is refused.
        """
        while True:
            try:
                return call.invoke(call.tensors)
            except InputsGoneError as error:
                logger.info("Resolute: %s; the call is made once more", error)

    def _survey(self, epoch: int) -> None:
        """Build the hooks anew if the weights epoch changed: another pack may have replaced a block."""
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
        """Where no compiled code ran, the forward is recorded as it is, without hooks."""
        misses = self._regions.misses
        misses.repeat()
        variant = frozenset(misses.lacks) if self.ran_compiled else None
        with installed(self._hooks if self.ran_compiled else ()):
            return self._recorder.capture(call, result, facts, variant)

    def _bypass(self, reason: BypassReason) -> None:
        # Once per call and reason: a model has seventy blocks, and one patch concerns them all.
        if reason in self._bypassed:
            return
        self._bypassed.add(reason)
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)
