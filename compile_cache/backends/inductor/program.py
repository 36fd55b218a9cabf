"""One module's hooks over the shared table of regions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...config import CacheConfig
from ...errors import BypassCode, BypassReason, first_line
from ...regions.region import Hook, HookBuilder, Progress, RegionSite, SilentProgress, installed
from ...stats import Stats
from ...store.artifact_store import ArtifactStore
from ..base import Call, Capabilities, Graph, Program
from ..cuda_graphs.capture import Recorder
from .parallel.pool import WorkerPool
from .parallel.scheduling import LOOKED, LookAhead, worker_count
from .regions.binding import BoundRegions
from .regions.table import RegionTable

logger = logging.getLogger(__name__)
T = TypeVar("T")


class InductorProgram(Program):
    """A call that comes to a region without an artifact looks at all of them first, and compiles them at once."""

    def __init__(
        self,
        owner: int,
        capabilities: Capabilities,
        table: RegionTable,
        workers: WorkerPool,
        store_for: Callable[[torch.device], ArtifactStore | None],
        build_hooks: HookBuilder,
        stats: Stats,
        config: CacheConfig,
    ) -> None:
        super().__init__(owner, capabilities)
        self._stats = stats
        self._recorder = Recorder()
        self._bypassed: set[BypassReason] = set()
        self._lasting: frozenset[BypassReason] = frozenset()  # found when hooks were built; they concern every call
        self._progress: Progress = SilentProgress()
        self._bound = BoundRegions(table, workers, store_for, stats, config, self._announce)
        self._build_hooks = build_hooks
        self._hooks: Sequence[Hook] = ()
        self._epoch: int | None = None
        self._workers = workers
        self._wanted_workers = config.workers
        self._use = 0  # of the workers, in a call that may look ahead
        self._may_look = False

    @property
    def regions(self) -> tuple[int, int]:
        return self._bound.compiled_count

    @property
    def region_keys(self) -> frozenset[str]:
        return self._bound.keys

    def run(self, call: Call) -> Any:
        self._bypassed.clear()
        self._survey(call.epoch)
        if not self._hooks:
            self._bypass(BypassReason(BypassCode.NO_REGIONS, "the model has no block that Resolute knows"))
            return call.invoke(call.tensors)
        self._progress = call.progress
        try:
            return self._without_workers_if_short(lambda: self._invoke(call))
        finally:
            self._progress = SilentProgress()

    def _without_workers_if_short(self, work: Callable[[], T]) -> T:
        """Where the processes that compile hold memory that the work needs, they end and it is done once more."""
        try:
            return work()
        except Exception as error:
            short = any(isinstance(each, torch.cuda.OutOfMemoryError) for each in (error, error.__cause__))
            if not short or not self._workers.running:
                raise
        logger.info("Resolute: out of memory; the processes that compile end, and the call is made once more")
        self._workers.close()
        self._may_look = False  # which would start them again
        torch.cuda.empty_cache()
        return work()

    def _invoke(self, call: Call) -> Any:
        """The call through its regions. One that comes to a region without an artifact looks at all of them first."""
        self._bound.begin(call.progress)
        # A patch that another pack put inside the model may count how often it is called.
        looks = self._may_look and call.capture_blocker is None
        self._use = worker_count(self._wanted_workers, call.tensors[0].device) if looks else 0
        with installed(self._hooks):
            try:
                result = call.invoke(call.tensors)
            except LookAhead:
                self._call_up(call.tensors[0].device)
                started = time.perf_counter()
                with self._bound.looking():
                    call.invoke(call.tensors)
                self._stats.event("look", "for all regions of the call", time.perf_counter() - started)
                self._build_ahead()
                result = call.invoke(call.tensors)
        self._may_look, self._use = False, 0  # what is missing later is little
        return result

    def _call_up(self, device: torch.device) -> None:
        count, self._use = self._use, 0
        try:
            self._workers.call_up(count, device)
        except OSError as error:
            logger.debug("Resolute: no processes that compile: %s", error)  # a warning follows when jobs want them

    def _build_ahead(self) -> None:
        try:
            self._bound.build_ahead(self._announce_ahead)
        except self._progress.cancellations:
            raise
        except Exception as error:
            logger.warning("Resolute: regions are compiled one after the other: %s", first_line(error))
            logger.debug("Resolute: why not at once", exc_info=True)

    def _survey(self, epoch: int) -> None:
        """Look at the module again whenever something about it changed: another pack may have exchanged a block."""
        if epoch == self._epoch:
            for reason in self._lasting:
                self._bypass(reason)
            return
        self._hooks = self._build_hooks(self._run_region, self._bypass)
        self._lasting = frozenset(self._bypassed)
        self._bound.survey(site for hook in self._hooks for site in hook.sites)
        self._may_look = self._may_look or self._epoch is None
        self._epoch = epoch

    def capture(self, call: Call, result: Any) -> Graph:
        with installed(self._hooks):
            return self._without_workers_if_short(lambda: self._recorder.capture(call, result))

    def _run_region(self, site: RegionSite, *tensors: torch.Tensor) -> Any:
        result = self._bound.run(site, tensors)
        if result is LOOKED:
            return site.function(site.module, *tensors)
        if isinstance(result, BypassReason):
            self._bypass(result)
            return site.function(site.module, *tensors)
        return result

    def _announce(self, kind: str) -> None:
        """A region is about to be compiled."""
        if self._use > 1:
            raise LookAhead
        done, total = self._bound.compiled_count
        self._progress.raise_if_cancelled()
        self._progress.report(done, total, f"compiling {min(done + 1, total)} of {total} regions ({kind})")

    def _announce_ahead(self, done: int, total: int, kind: str) -> None:
        self._progress.report(done, total, f"compiled {done} of {total} regions ({kind})")

    def _bypass(self, reason: BypassReason) -> None:
        # Once per call and reason: a model has seventy blocks, and one patch concerns them all.
        if reason in self._bypassed:
            return
        self._bypassed.add(reason)
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)
