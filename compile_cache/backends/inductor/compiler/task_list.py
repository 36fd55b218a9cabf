"""The regions without code: tasks that calls queued, as copies without weights, and jobs that workers compile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ....attribute_policy import ModuleAttributePolicy
from ....config import CacheConfig
from ....errors import BypassReason, first_line
from ....modules.skeleton import skeleton_of
from ....telemetry.compile_eta import CompileEta
from ....telemetry.stats import Stats
from ....torch_compat.out_of_memory import is_out_of_memory
from ..lower.compiled_region import CompiledRegion
from ..lower.tracing import Shapes
from ..regions.region import Region, RegionCall
from ..regions.table import RegionTable
from .failures import NotCompiledError
from .job import settings_for
from .pool import WorkerPool
from .process import Compiled
from .task import CompileTask
from .worker_lease import WorkerLease

logger = logging.getLogger(__name__)


def nothing() -> None: ...


class TaskList:
    """The queued tasks of all models, and the jobs in the workers.

    waiting, jobs: by region key. at_work: the key of the region that this process traces or compiles.
    next_strategies: the strategy to try if a comparison rejects the code. has_no_workers: no worker can be used.
    eta: estimates when all regions are compiled. on_left: called when a call has queued a region.
    """

    def __init__(self, table: RegionTable, workers: WorkerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.table, self.lease, self.clock = table, WorkerLease(workers, clock), clock
        self.lock = threading.RLock()
        self.waiting: dict[str, CompileTask] = {}
        self.jobs: dict[str, tuple[Compiled, CompileTask]] = {}
        self.at_work: str | None = None
        self.next_strategies: dict[tuple[str, Shapes], int] = {}
        self.has_no_workers = False
        self.stats, self.eta = Stats(), CompileEta()
        self.on_left: Callable[[], None] = nothing
        self._config, self._is_decoder = CacheConfig(), False
        self._settings: dict[torch.device, dict[str, Any]] = {}  # per call: reading them takes milliseconds

    # --- calls -----------------------------------------------------------------------------------------------------

    def begin(self, config: CacheConfig, is_decoder: bool) -> None:
        """A call of a module begins. is_decoder: the module is a VAE."""
        self._config, self._is_decoder, self._settings = config, is_decoder, {}

    @property
    def left(self) -> int:
        """The number of regions that have no code yet."""
        with self.lock:
            return len(self._keys())

    def _keys(self) -> set[str]:
        return {*self.waiting, *self.jobs, *([self.at_work] if self.at_work else [])}

    @property
    def tasks(self) -> list[CompileTask]:
        return [*self.waiting.values(), *[task for _, task in self.jobs.values()]]

    def awaits(self, region: Region) -> bool:
        """See `DeferredCompiler`."""
        with self.lock:
            if task := self.waiting.get(region.key):
                task.calls, task.is_foreseen = task.calls + 1, False
            return region.key in self._keys()

    def holds(self, region: Region) -> bool:
        """True if the region is queued or being compiled."""
        with self.lock:
            return region.key in self._keys()

    def try_again(self, keys: Iterable[str]) -> None:
        """Retry these regions now, without the delay for memory or for another process's compile."""
        with self.lock:
            for task in [self.waiting[key] for key in keys if key in self.waiting]:
                task.not_before, task.found_no_memory = 0.0, False

    def note(self, call: RegionCall, found: CompiledRegion | BypassReason | None, is_foreseen: bool = False) -> None:
        """See `DeferredCompiler`."""
        if found is not None:
            self.next_strategies.pop((call.region.key, call.shapes), None)
            return
        region = call.region
        if self.holds(region):
            return
        if is_foreseen:
            if region.compiled or region.failures or not call.fits:
                return
            if call.store is not None and self.table.preload(region.key, call.store):
                return
        self.stats, device = call.stats, call.tensors[0].device
        self.lease.plan(self._config.workers)
        try:
            settings = self._settings_of(device)
            copied = _without_model(call, self._config.attribute_policy)
        except Exception as error:  # a class may have a faulty copy method: the block runs eagerly, and we log why
            if is_out_of_memory(error):  # the next call queues the region again
                raise
            self.give_up(call, error)
            return
        task = CompileTask(copied, settings, len(call.weights), is_foreseen=is_foreseen)
        task.strategy, task.is_decoder = self.next_strategies.pop(task.attempt_key, 0), self._is_decoder
        if not task.has_strategy:
            self.give_up(call, NotCompiledError("its code fails or gives other results than the original"))
            return
        with self.lock:
            self.waiting[task.key] = task
        self.on_left()

    def _settings_of(self, device: torch.device) -> dict[str, Any]:
        if device not in self._settings:
            try:
                self._settings[device] = settings_for(device)
            except Exception as error:  # noqa: BLE001 (no worker could apply the settings, so this process compiles)
                logger.warning("Resolute: no worker processes compile: %s", first_line(error))
                self._settings[device], self.has_no_workers = {}, True
        return self._settings[device]

    def give_up(self, call: RegionCall, error: Exception) -> None:
        """The region cannot be compiled: it runs eagerly from now on."""
        with self.table.lock:
            reason = call.fails(f"{call.region.label}: {first_line(error)}")
        logger.warning("Resolute: %s; it runs eagerly", reason.detail)
        logger.debug("Resolute: why", exc_info=error)


def _without_model(call: RegionCall, policy: ModuleAttributePolicy) -> RegionCall:
    """A copy of the call that keeps no reference to the model: a block without weights, and placeholder inputs."""
    site = replace(call.site, module=skeleton_of(call.site.module, policy), foreseen=None)
    kept = replace(call, site=site, weights=(), tensors=list(map(_placeholder, call.tensors)))
    return replace(kept, announce=nothing)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of equal shape, dtype and device with a single element of memory. Integers are copied instead, because
    an index must stay within its table.
    """
    has_contents = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return tensor.clone() if has_contents else tensor.new_empty((1,) * tensor.ndim).expand(tensor.shape)
