"""One module and its calls: through hooks, compiled regions, and on CUDA captures of the whole forward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...config import CacheConfig
from ...errors import BypassCode, BypassReason, InputsGoneError, first_line
from ...regions import gguf_loras
from ...regions.site import Hook, HookBuilder, installed
from ...stats import Stats
from ...store.artifact_store import ArtifactStore
from ...torch_facts.out_of_memory import is_out_of_memory
from ..base import Call, Capabilities, CaptureFacts, Graph, Program
from ..cuda_graphs.capture import Recorder
from .parallel.awaited import AwaitedCall
from .parallel.behind import CompilesBehind, Waited
from .parallel.compile_queue import CompileQueue
from .parallel.described_gpu import why_not
from .parallel.pool import worker_count
from .regions.binding import RegionBinding
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
        behind: CompilesBehind,
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
        self._table = table
        self._regions = RegionBinding(table, store_for, self._bypass, stats, config)
        self._build_hooks = build_hooks
        self._hooks: Sequence[Hook] = ()
        self._epoch: int | None = None
        self._behind, self._config = behind, config
        self._is_first = True  # no call was answered yet that had its regions compiled
        self._waited: Waited = None  # the latest call, if it waits for code

    @property
    def waits(self) -> bool:
        return self._regions.waits

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
        self._bypassed.clear()
        self._survey(call.epoch)
        self.ran_compiled = False
        if not self._hooks:
            if not self._lasting:  # else they say why there is none
                self._bypass(BypassReason(BypassCode.NO_REGIONS, "the model has no block that Resolute knows"))
            return call.invoke(call.tensors)
        region_calls = self._stats.counters.region_calls
        with self._behind.lock:
            result = self._again_if_short(call)
            self.ran_compiled = self._stats.counters.region_calls > region_calls
            self._waited = self._behind.advance(call, self.ran_compiled) if self.waits else None
        if not self._regions.was_reached and not self._bypassed:
            why = "no block of the model was called with inputs that Resolute knows"
            self._bypass(BypassReason(BypassCode.NO_REGIONS, why))
        return result

    def _again_if_short(self, call: Call) -> Any:
        """Answer the call. If memory runs out while LoRAs of GGUF weights hold some, let these go and do it again."""
        try:
            return self._invoke(call)
        except Exception as error:
            short = any(map(is_out_of_memory, (error, error.__cause__)))
            if not short or call.module is None or not gguf_loras.give_up(call.module.parameters()):
                raise
        logger.info("Resolute: out of memory; what only compiled code needs goes, and the call is made once more")
        torch.cuda.empty_cache()
        return self._invoke(call)

    def _invoke(self, call: Call) -> Any:
        """Run the call through its regions; twice, if it waits for those that workers compile.

        Which regions lack code, and for which inputs, shows only when the call runs. So its first run leaves them to
        the queue, as each run does that waits for nothing; what is still missing then is compiled by the second one.
        """
        behind = self._behind
        if behind.has_nothing_for(call, self._waited):
            return call.invoke(call.tensors)
        self._waited = None  # until it is answered
        count = 0 if (is_behind := behind.serves(call, self._config)) else self._worker_count(call)
        queue = behind.queue if is_behind or count else None
        if queue is None and behind.queue.left:
            behind.queue.hand_over(self._regions.keys)
        with installed(self._hooks):
            self._regions.begin(call.progress, call.torch_flags, queue)
            result = self._run_twice(call, behind.queue, count) if count else self._run_regions(call)
        self._is_first = self._is_first and is_behind
        return result

    def _run_twice(self, call: Call, queue: CompileQueue, count: int) -> Any:
        """Run the call, wait until so many workers compiled what it left, and run it again if it left anything."""
        started, stalled = self._stats.clock(), self._stats.waiting_seconds()
        region_calls = self._stats.counters.region_calls
        with AwaitedCall(queue, call, count) as awaited:
            result = self._run_regions(call)
            if not self._regions.waits:
                return result
            del result  # a decoded image takes memory that the second run needs
            self._stats.counters.region_calls = region_calls  # those of the second run count
            self._stats.waited_since(started, stalled, "compile", "for all regions of the call")
            awaited.finish(self._regions.keys, self._regions.announce)
        self._regions.begin(call.progress, call.torch_flags)
        return self._run_regions(call)

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

    def _worker_count(self, call: Call) -> int:
        """The number of workers that may compile for this call; 0 if each region is compiled in turn."""
        # A patch of another pack inside the model may count its calls, so a call with a capture blocker runs once.
        if not self._is_first or call.capture_blocker is not None or why_not(call.tensors[0].device):
            return 0
        return worker_count(self._config.workers)

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
        with installed(self._hooks):
            return self._recorder.capture(call, result, facts)

    def _bypass(self, reason: BypassReason) -> None:
        # Once per call and reason: a model has seventy blocks, and one patch concerns them all.
        if reason in self._bypassed:
            return
        self._bypassed.add(reason)
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)
