"""One module and its calls: through hooks, compiled regions, and on CUDA captures of the whole forward."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...config import CacheConfig
from ...errors import BypassCode, BypassReason, InputsGoneError, first_line
from ...keys import Role
from ...regions import gguf_loras
from ...regions.site import Hook, HookBuilder, installed
from ...stats import Stats
from ...store.artifact_store import ArtifactStore
from ...torch_facts.out_of_memory import is_out_of_memory
from ...torch_facts.private_names import Loss, lost
from ..base import Call, Capabilities, CaptureFacts, Graph, Program, UpcomingDecode
from ..cuda_graphs.capture import Recorder
from .parallel.behind import CompilesBehind, Waited
from .parallel.parallel_compile import compile_in_parallel
from .parallel.pool import WorkerPool, room_for, worker_count_before
from .regions.binding import RegionBinding
from .regions.look_ahead import LookAhead
from .regions.region import RegionCall
from .regions.table import RegionTable

logger = logging.getLogger(__name__)
T = TypeVar("T")


class InductorProgram(Program):
    """One module on the inductor backend.

    upcoming_calls: decodes for which compiles may begin beside those of another module, by the number of their module;
        all programs share it. store_for: the store for compiled regions of a device, or None. build_hooks: see
        `HookBuilder`.
    """

    def __init__(
        self,
        owner: int,
        capabilities: Capabilities,
        table: RegionTable,
        workers: WorkerPool,
        behind: CompilesBehind,
        upcoming_calls: dict[int, UpcomingDecode],
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
        self._regions = RegionBinding(table, store_for, lambda: not workers.running, self._bypass, stats, config)
        self._build_hooks = build_hooks
        self._hooks: Sequence[Hook] = ()
        self._epoch: int | None = None
        self._workers, self._behind = workers, behind
        self._upcoming_calls = upcoming_calls
        self._config = config
        self._is_first = True  # no call was answered yet
        self._is_rehearsed = self._was_upcoming = False
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
            result = self._again_if_short(lambda: self._invoke(call), call.module)
            self.ran_compiled = self._stats.counters.region_calls > region_calls
            self._waited = self._behind.advance(call, self.ran_compiled) if self.waits else None
        if self._was_upcoming:
            self._was_upcoming = False
            self._forget_upcoming()
        if not self._regions.was_reached and not self._bypassed:
            why = "no block of the model was called with inputs that Resolute knows"
            self._bypass(BypassReason(BypassCode.NO_REGIONS, why))
        return result

    def _again_if_short(self, work: Callable[[], T], module: torch.nn.Module | None = None) -> T:
        """Do the work. If memory runs out while worker processes or LoRAs of the module's GGUF weights hold some, let
        these go and do it again.
        """
        try:
            return work()
        except Exception as error:
            short = any(map(is_out_of_memory, (error, error.__cause__)))
            weights = () if module is None else module.parameters()
            if not short or not (gguf_loras.give_up(weights) or self._workers.running):
                raise
        logger.info("Resolute: out of memory; what only compiled code needs goes, and the call is made once more")
        if self._workers.running:
            self._workers.close()
            self._is_first = False  # else the call would start them again
        torch.cuda.empty_cache()
        return work()

    def _invoke(self, call: Call) -> Any:
        """Run the call through its regions; twice, if many of them have to be compiled.

        The first call of a program may find most regions without compiled code. Worker processes compile them all at
        once, but which they are, and for which inputs, shows only when the call runs. So it first runs with their
        originals in place, and runs again once they are compiled.
        """
        if self._behind.has_nothing_for(call, self._waited):
            return call.invoke(call.tensors)
        behind = self._behind if self._behind.serves(call, self._config) else None
        self._regions.begin(call.progress, call.torch_flags, call.weights.streams, behind)
        with installed(self._hooks):
            if behind is not None:
                result = self._run_regions(call)
            elif call.rehearsal is not None and not self._is_rehearsed:
                self._rehearse(call, call.rehearsal)
                result = self._run_regions(call)
            else:
                result = self._run_ahead(call, lambda: self._run_regions(call))
        self._is_first = False
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

    def _rehearse(self, call: Call, rehearsal: Callable[[], None]) -> None:
        """Compile the regions of all states that blocks may have in such a call, so that no later one has to.

        The call itself may bring blocks into some states only, and it is long. The rehearsal is short, so it finds what
        is missing for the workers, and then compiles the rest.
        """
        try:
            with torch.random.fork_rng([call.device] if call.device.startswith("cuda") else []):
                self._run_ahead(call, rehearsal)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, call.progress.cancellations):
                raise
            logger.info(
                "Resolute: the regions of this decode are compiled when it comes to them: %s", first_line(error)
            )
            logger.debug("Resolute: why not before", exc_info=True)
        self._is_rehearsed = True

    def _worker_count(self, call: Call) -> int:
        """The number of workers that may compile for this call; 0 if each region is compiled in turn."""
        # A patch of another pack inside the model may count its calls, so a call with a capture blocker runs once.
        if not self._is_first or call.capture_blocker is not None or lost(Loss.WORKERS, Loss.KEEPING):
            return 0
        count = worker_count_before(self._config.workers, call, *self._regions.compiled_count)
        return count or (2 if self._workers.running and self._workers.has_early_for(self.owner) else 0)

    def _run_ahead(self, call: Call, run: Callable[[], T]) -> T:
        """Do `run`, the call or its rehearsal. Where workers may compile for it, do it first with the original in place
        of each region that has no compiled code, and again once they compiled these; in the last time what is still
        missing is compiled, one region after the other.
        """
        count = self._worker_count(call)
        if count:
            with contextlib.ExitStack() as room:
                result, missing = self._find_missing(call, count, room, run)
                if not missing:
                    return result
                del result  # a decoded image takes memory that the second run needs
                self._compile_in_parallel(call, missing)
        return run()

    def _find_missing(
        self, call: Call, count: int, room: contextlib.ExitStack, run: Callable[[], T]
    ) -> tuple[T, list[RegionCall]]:
        """The result of `run` without compiles, and one call of each region that has no compiled code.

        room: holds the memory of the workers; when it is closed, weights get back what they gave for it.
        """

        def start_workers() -> None:  # while the call runs on
            try:
                has_room = room.enter_context(call.weights.room(room_for(count)))
                if has_room:
                    room.callback(self._workers.end_unless_busy)
                room.enter_context(self._workers.in_use(count, call.tensors[0].device, has_room))
            except Exception as error:
                logger.warning("Resolute: no worker processes were started: %s", first_line(error))
                logger.debug("Resolute: why", exc_info=True)

        started, stalled = self._stats.clock(), self._stats.waiting_seconds()
        with self._regions.postponing_compiles(start_workers) as missing:
            result = run()
        if missing:  # the call runs once more, so the prompt waited for all of this run
            self._stats.waited_since(started, stalled, "compile", "for all regions of the call")
        return result, list(missing.values())

    def _compile_in_parallel(self, call: Call, missing: list[RegionCall]) -> None:
        decodes = self._take_upcoming(call)
        given = (call, self._table, missing[0].store, self._stats, self._config)
        upcoming = [LookAhead(owner, decode, *given) for owner, decode in decodes.items()]
        try:
            compile_in_parallel(missing, self._table, self._workers, upcoming)
        except missing[0].progress.cancellations:
            for owner, decode in decodes.items():
                self._upcoming_calls.setdefault(owner, decode)
            raise
        except Exception as error:
            logger.warning("Resolute: regions are compiled one after the other: %s", first_line(error))
            logger.debug("Resolute: why not at once", exc_info=True)

    def compile_ahead(self, decode: UpcomingDecode) -> None:
        if self._is_first:
            self._upcoming_calls[self.owner] = decode
            self._was_upcoming = True

    def _take_upcoming(self, now: Call) -> dict[int, UpcomingDecode]:
        """The decodes that come after this call, by the number of their module; each is looked at once.

        After a diffusion model comes its decode. After another module comes the diffusion model, which must not wait.
        """
        if now.key.role is not Role.UNET or now.weights.streams:  # nor does it get memory from weights that stream
            return {}
        taken = [(owner, self._upcoming_calls.pop(owner, None)) for owner in list(self._upcoming_calls)]
        device = now.tensors[0].device
        return {owner: decode for owner, decode in taken if decode is not None and decode.device == device}

    def _forget_upcoming(self) -> None:
        self._upcoming_calls.pop(self.owner, None)
        self._workers.forget(self.owner)

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
        self._forget_upcoming()

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> Graph:
        with installed(self._hooks):
            return self._again_if_short(lambda: self._recorder.capture(call, result, facts))

    def _bypass(self, reason: BypassReason) -> None:
        # Once per call and reason: a model has seventy blocks, and one patch concerns them all.
        if reason in self._bypassed:
            return
        self._bypassed.add(reason)
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)
