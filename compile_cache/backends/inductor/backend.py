"""The default backend: regions compiled once for every shape, captures of the whole forward on CUDA."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...artifact_store import NAMED, ArtifactStore, StoreError
from ...config import CacheConfig
from ...errors import BypassCode, BypassReason, first_line
from ...fingerprint import EnvironmentFingerprint
from ...regions import Hook, HookBuilder, Monitor, RegionSite, SilentMonitor, installed
from ...stats import Stats
from ..base import Backend, Call, Capabilities, Graph, Located, Program
from ..capture import Recorder
from .looking import LOOKED, LookAhead, suitable
from .workers import Workers

if TYPE_CHECKING:  # which imports inductor: seconds, and only where something is compiled
    from .region_table import RegionTable

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The oldest torch whose make_fx and inductor take the path of `tracing`; tests run on it.
OLDEST_TORCH = (2, 8)


class InductorBackend(Backend):
    name = "inductor"

    def __init__(self) -> None:
        self.workers = Workers()
        self._table: RegionTable | None = None
        self._lock = threading.Lock()
        self._preparing: threading.Thread | None = None
        self._stores: dict[EnvironmentFingerprint, ArtifactStore | None] = {}
        self._latest: ArtifactStore | None = None

    @property
    def table(self) -> RegionTable:
        with self._lock:
            if self._table is None:
                from .region_table import RegionTable

                self._table = RegionTable()
            return self._table

    def probe(self, device: str) -> Capabilities:
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if version < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            return _missing(f"it needs torch {oldest} or newer, and this is {torch.__version__}", "Update torch.")
        if device == "cuda":
            return _probe_cuda()
        if device == "cpu":
            return _probe_cpu()
        return _missing(f"it was not tried on '{device}'", "Choose 'auto' or 'eager'.")

    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        def store_for(device: torch.device) -> ArtifactStore | None:
            return self._store(device, config)

        return InductorProgram(owner, capabilities, self.table, self.workers, store_for, build_hooks, stats, config)

    def expect(self, device: torch.device, config: CacheConfig) -> None:
        """Import inductor while the model is still loaded; where nothing was ever compiled, the processes that compile
        begin too.
        """
        if self._preparing is not None and self._preparing.is_alive():
            return
        if self._table is None or not self._table.compiled:
            self._preparing = threading.Thread(target=self._prepare, args=(device, config), daemon=True)
            self._preparing.start()

    def _prepare(self, device: torch.device, config: CacheConfig) -> None:
        try:
            store = self._store(device, config)
            if suitable(config.workers, device) and (store is None or not any(store.names())):
                self.workers.start(device)
            self.table  # noqa: B018 (it is made)
        except Exception as error:
            logger.warning("Resolute: nothing is started ahead: %s", first_line(error))
            logger.debug("Resolute: why", exc_info=True)

    def stored(self) -> dict[str, int]:
        latest = self._latest
        return {} if latest is None else latest.report()

    def located(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> Located:
        store = self._store(device, config)
        wanted = frozenset(keys)
        in_memory = wanted & self.table.compiled
        stored = set() if store is None else {name.partition("-")[0] for name in store.names()}
        on_disk = frozenset(key for key in wanted - in_memory if key[:NAMED] in stored)
        return Located(in_memory, on_disk, wanted - in_memory - on_disk)

    def preload(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> int:
        store = self._store(device, config)
        return 0 if store is None else sum(self.table.preload(key, store) for key in keys)

    def _store(self, device: torch.device, config: CacheConfig) -> ArtifactStore | None:
        """Where compiled regions of a device are kept over restarts, if they are.

        The environment is read anew: another pack may have changed the precision of multiplications since.
        """
        if config.store_folder is None:
            return None
        from .environment import environment_of

        environment = environment_of(device, config.source)
        if environment not in self._stores:
            try:
                self._stores[environment] = ArtifactStore(config.store_folder, environment, config.store_bytes)
            except StoreError as error:
                logger.warning("Resolute: %s. Regions are compiled again after a restart.", error)
                self._stores[environment] = None
        store = self._stores[environment]
        self._latest = store or self._latest
        return store


def _missing(reason: str, remedy: str) -> Capabilities:
    return Capabilities(available=False, reason=reason, remedy=remedy)


def _probe_cuda() -> Capabilities:
    if find_spec("triton") is None:
        return _missing("Triton is not installed", "Install it ('triton', on Windows 'triton-windows').")
    if sys.platform != "win32" and not _on_path(os.environ.get("CC"), "cc", "gcc", "clang"):
        return _missing("Triton finds no C compiler", "Install one, for example 'apt install gcc', or choose 'auto'.")
    return Capabilities(available=True, compiles=True, captures=torch.version.hip is None)


def _probe_cpu() -> Capabilities:
    compilers = ("cl",) if sys.platform == "win32" else ("g++", "c++", "clang++")
    if not _on_path(os.environ.get("CXX"), *compilers):
        return _missing("there is no C++ compiler", "Install one, for example 'apt install g++', or choose 'auto'.")
    return Capabilities(available=True, compiles=True)


def _on_path(*names: str | None) -> bool:
    return any(name is not None and shutil.which(name) is not None for name in names)


class InductorProgram(Program):
    """One module's hooks over the shared table of regions."""

    def __init__(
        self,
        owner: int,
        capabilities: Capabilities,
        table: Any,
        workers: Workers,
        store_for: Callable[[torch.device], ArtifactStore | None],
        build_hooks: HookBuilder,
        stats: Stats,
        config: CacheConfig,
    ) -> None:
        super().__init__(owner, capabilities)
        from .bound_region import BoundRegions

        self._stats = stats
        self._recorder = Recorder()
        self._bypassed: set[BypassReason] = set()
        self._lasting: frozenset[BypassReason] = frozenset()  # found when hooks were built; they concern every call
        self._monitor: Monitor = SilentMonitor()
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
        return self._bound.progress

    @property
    def region_keys(self) -> frozenset[str]:
        return self._bound.keys

    def run(self, call: Call) -> Any:
        self._bypassed.clear()
        self._survey(call.epoch)
        if not self._hooks:
            self._bypass(BypassReason(BypassCode.NO_REGIONS, "the model has no block that Resolute knows"))
            return call.invoke(call.tensors)
        self._monitor = call.monitor
        try:
            return self._without_workers_if_short(lambda: self._invoke(call))
        finally:
            self._monitor = SilentMonitor()

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
        self._bound.begin(call.monitor)
        # A patch that another pack put inside the model may count how often it is called.
        looks = self._may_look and call.capture_blocker is None
        self._use = suitable(self._wanted_workers, call.tensors[0].device) if looks else 0
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
        except self._monitor.cancellations:
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
        done, total = self._bound.progress
        self._monitor.checkpoint()
        self._monitor.progress(done, total, f"compiling {min(done + 1, total)} of {total} regions ({kind})")

    def _announce_ahead(self, done: int, total: int, kind: str) -> None:
        self._monitor.progress(done, total, f"compiled {done} of {total} regions ({kind})")

    def _bypass(self, reason: BypassReason) -> None:
        # Once per call and reason: a model has seventy blocks, and one patch concerns them all.
        if reason in self._bypassed:
            return
        self._bypassed.add(reason)
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)
