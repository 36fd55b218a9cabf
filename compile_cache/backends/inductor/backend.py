"""The default backend: inductor compiles each region once for all shapes; on CUDA it also captures each signature."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...config import CacheConfig
from ...errors import first_line
from ...modules.site import HookBuilder
from ...store.artifact_store import DIGEST_CHARS, ArtifactStore, StoreError
from ...store.fingerprint import EnvironmentFingerprint
from ...store.temporary_folders import remove_abandoned
from ...telemetry.host_load import HostLoad
from ...telemetry.stats import Stats
from ...torch_compat import fake_devices
from ...torch_compat.gpu import is_nvidia
from ...torch_compat.private_names import Feature, import_inductor, why_unavailable, yielding_gil
from ..base import Backend, Capabilities, Located, Program
from .compiler.pool import WorkerPool, worker_count
from .toolchain import lack_of

if TYPE_CHECKING:  # importing inductor takes seconds, and not every process compiles
    from .compiler.background import BackgroundCompiler
    from .regions.table import RegionTable

logger = logging.getLogger(__name__)

# The oldest torch that `lower/` supports, and the newest torch that it was tested with. The tests run on both.
OLDEST_TORCH = (2, 8)
NEWEST_TORCH = (2, 15)


class InductorBackend(Backend):
    name = "inductor"

    def __init__(self) -> None:
        fake_devices.keep()
        self.workers = WorkerPool()
        self._table: RegionTable | None = None
        self._background: BackgroundCompiler | None = None
        self._lock = threading.Lock()
        self._prewarming: threading.Thread | None = None
        self._lacks_regions = False
        self._preloading: bool | None = None  # True while the first `preload` runs; None before it
        self._stores: dict[EnvironmentFingerprint, ArtifactStore | None] = {}
        self._latest: ArtifactStore | None = None

    @property
    def table(self) -> RegionTable:
        with self._lock:
            if self._table is None:
                from .regions.table import RegionTable

                self._table = RegionTable()
            return self._table

    def probe(self, device: str) -> Capabilities:
        """See `Backend.probe`. Imports inductor to look for torch's private names, if device and compiler exist."""
        machine = _probe_machine(device)
        return _probe_torch(machine, device) if machine.available else machine

    def probe_at_once(self, device: str) -> Capabilities:
        return _probe_machine(device) if self.is_starting else self.probe(device)

    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        def store_for(device: torch.device) -> ArtifactStore | None:
            return self._store(device, config)

        from .compiler.background import BackgroundCompiler
        from .compiler.compile_queue import CompileQueue
        from .program import InductorProgram

        self._background = self._background or BackgroundCompiler(CompileQueue(self.table, self.workers))
        shared = (self.table, self._background.queue)
        return InductorProgram(owner, capabilities, *shared, store_for, build_hooks, stats, config)

    def prewarm(self, device: torch.device, config: CacheConfig, host: HostLoad, lacks_regions: bool = False) -> None:
        """Import inductor in a thread while ComfyUI still loads the model.

        Also start the worker processes if regions must be compiled (the store is empty, or `lacks_regions`), and start
        them again if they ended before a model was bound.
        """
        self._lacks_regions = self._lacks_regions or lacks_regions
        if lacks_regions:  # the thread may have passed that check
            self._start_workers(device, config)
        if self._prewarming is None or (self._background is None and not self._prewarming.is_alive()):
            self._prewarming = threading.Thread(target=self._prewarm, args=(device, config, host), daemon=True)
            self._prewarming.start()

    @property
    def is_starting(self) -> bool:
        return bool(self._preloading) or (self._prewarming is not None and self._prewarming.is_alive())

    def _prewarm(self, device: torch.device, config: CacheConfig, host: HostLoad) -> None:
        if not _probe_machine(device.type).available:
            return
        self._start_workers(device, config)
        with host.working(), yielding_gil():
            import_inductor(host.rest)
            if self.probe(device.type).available:
                self.table  # noqa: B018 (imports what is left)
                from . import program  # noqa: F401
                from .lower import operators, tracing

                host.rest()
                operators.register()
                host.rest()
                tracing.import_all()

    def _start_workers(self, device: torch.device, config: CacheConfig) -> None:
        try:
            remove_abandoned()
            compiles = self._lacks_regions or self._has_nothing_stored(device, config)
            if compiles and worker_count(config.workers) > 0:
                self.workers.start()
        except Exception as error:
            logger.warning("Resolute: worker processes were not started early: %s", first_line(error))
            logger.debug("Resolute: why", exc_info=True)

    def _has_nothing_stored(self, device: torch.device, config: CacheConfig) -> bool:
        # `is_new` looks at the folder alone. `_store` needs the environment, which imports inductor.
        if config.store_folder is None or ArtifactStore.is_new(config.store_folder):
            return True
        store = self._store(device, config)
        return not _names(store)

    def stored(self) -> dict[str, int]:
        latest = self._latest
        try:
            return {} if latest is None else latest.report()
        except OSError as error:
            logger.warning("Resolute: what is stored cannot be counted: %s", error)
            return {}

    def ready_regions(self) -> int:
        return 0 if self._table is None else len(self._table.compiled_keys)

    def failed_regions(self) -> list[str]:
        return [] if self._table is None else self._table.failed

    def retry_failed(self) -> None:
        if self._table is not None:
            self._table.retry_failed()

    def compile_eta(self, more: int = 0) -> tuple[int, float | None]:
        background = self._background
        return (0, 0.0) if background is None else background.compile_eta(more)

    def locate(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> Located:
        store = self._store(device, config)
        wanted = frozenset(keys)
        # Without a table no code is in memory; creating one would import inductor and block the caller for seconds.
        in_memory = frozenset() if self._table is None else wanted & self._table.compiled_keys
        stored = {name.partition("-")[0] for name in _names(store)}
        on_disk = frozenset(key for key in wanted - in_memory if key[:DIGEST_CHARS] in stored)
        return Located(in_memory, on_disk, wanted - in_memory - on_disk)

    def preload(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> int:
        if not _probe_machine(device.type).available:  # torch needs a compiler to load code too: all would be discarded
            return 0
        self._preloading = self._preloading is None  # the first `preload` also imports inductor
        try:
            store = self._store(device, config)
            return 0 if store is None else sum(self.table.preload(key, store) for key in keys)
        finally:
            self._preloading = False

    def _store(self, device: torch.device, config: CacheConfig) -> ArtifactStore | None:
        """The store of compiled regions for a device; None if the setting is off or the folder cannot be used.

        Reads the environment at each call, because another pack may have changed a flag such as TF32.
        """
        if config.store_folder is None or why_unavailable(Feature.KEEPING):
            return None
        try:
            from .lower.environment import environment_of

            environment = environment_of(device, config.source)
        except Exception as error:  # another torch version may name its settings and flags differently
            _warn_once(f"the environment of compiled code is unknown, so none is kept: {first_line(error)}")
            logger.debug("Resolute: why", exc_info=True)
            return None
        store = self._stores.get(environment) or _open_store(config, environment)
        self._stores[environment] = store  # None is retried: the folder may be usable later
        self._latest = store or self._latest
        return store


def _names(store: ArtifactStore | None) -> list[str]:
    """The names of the store's artifacts; none if the folder cannot be read: then nothing can be loaded either."""
    try:
        return [] if store is None else store.names()
    except OSError as error:
        logger.warning("Resolute: the store of compiled regions cannot be read: %s", error)
        return []


def _open_store(config: CacheConfig, environment: EnvironmentFingerprint) -> ArtifactStore | None:
    assert config.store_folder is not None
    try:
        return ArtifactStore(config.store_folder, environment, config.store_bytes, config.application)
    except Exception as error:
        _warn_once(f"{error}. Regions are compiled again after a restart")
        logger.debug("Resolute: why", exc_info=None if isinstance(error, StoreError) else error)
        return None


def _probe_machine(device: str) -> Capabilities:
    """The capabilities by torch's version, the device and its compiler. Imports nothing."""
    if _version() < OLDEST_TORCH:
        reason = f"it needs torch {_text(OLDEST_TORCH)} or newer, and this is {torch.__version__}"
        return _missing(reason, "Update torch.")
    if device not in ("cuda", "cpu"):
        return _missing(f"it was not tested on '{device}'", "Choose 'auto' or 'eager'.")
    lack = lack_of(device)
    if lack is not None:
        return _missing(*lack)
    return Capabilities(available=True, compiles=True, captures=is_nvidia(device))


def _probe_torch(machine: Capabilities, device: str) -> Capabilities:
    """The machine's capabilities, without those for which this torch lacks a private name."""
    lack = why_unavailable(Feature.CALLS, Feature.COMPILING)
    if lack:
        return _missing(lack, f"Update Resolute, or install torch {_text(NEWEST_TORCH)} or older.")
    losses = [
        why_unavailable(Feature.KEEPING),
        why_unavailable(Feature.WORKERS),
        why_unavailable(Feature.GPU_WORKERS) if device == "cuda" else "",
    ]
    addresses = why_unavailable(Feature.ADDRESSES) if machine.captures and _is_malloc_async() else ""
    if _version() > NEWEST_TORCH:
        newest = _text(NEWEST_TORCH)
        losses.insert(0, f"torch {torch.__version__} is newer than {newest}, the newest that Resolute was tested on")
    detail = "; ".join(filter(None, [*losses, addresses]))
    if detail:
        _warn_once(detail)
    return replace(machine, captures=machine.captures and not addresses, detail=detail)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _is_malloc_async() -> bool:
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("Resolute: %s.", text)


def _missing(reason: str, remedy: str) -> Capabilities:
    return Capabilities(available=False, reason=reason, remedy=remedy)
