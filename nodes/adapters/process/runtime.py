"""The one GraphCache of the process, and the record of each module that runs through it."""

from __future__ import annotations

import atexit
import collections
import functools
import itertools
import logging
import queue
import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import torch

from ....compile_cache.attention.chooser import chooser
from ....compile_cache.backends.base import Capabilities, Code, Program
from ....compile_cache.backends.cudagraph import CudaGraphBackend, CudaGraphProgram
from ....compile_cache.cache.captures import free_bytes
from ....compile_cache.cache.graph_cache import GraphCache
from ....compile_cache.config import CacheConfig
from ....compile_cache.keys import GraphKey, Role, digest
from ....compile_cache.modules.structure import structure_digest
from ..comfyui import messages
from ..comfyui.module_attributes import ATTRIBUTES
from ..dynamic_vram import aimdo, page_loading
from ..module_state.module_state import ModuleState
from ..trust.model_code import MANAGEMENT_MODULES
from . import collector, store_location, user_settings
from .compile_request import CompileRequest
from .module_hooks import ModuleHooks

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_cache: GraphCache | None = None
_holders: dict[str, Any] = {}  # a MemoryHolder for each device that had captures
_owners: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_records: dict[int, ModuleRecord] = {}
_numbers = itertools.count(1)
# Numbers of modules that were garbage collected. Garbage is collected in any thread at any moment, also in one that a
# compile waits for while this pack's locks are held. So the finalizer only notes the number. A thread, `_clean_up`,
# drops the module's record and captures, unless a caller of `cache` or `program_for` does so first.
_collected: collections.deque[int] = collections.deque()
_to_forget: collections.deque[int] = collections.deque()  # numbers whose captures are not dropped yet
_wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is reentrant, so a finalizer may call it
_cleaner: threading.Thread | None = None
_ending = threading.Event()
_END_SECONDS = 10.0  # timeout for the thread's end


# --- the cache ---------------------------------------------------------------------------------------------------


def cache() -> GraphCache:
    """The process's GraphCache, made at first use. Raises UserError for a setting that cannot be read."""
    global _cache
    while (owner := _next(_collected)) is not None:
        _to_forget.append(owner)
        record = _records.pop(owner, None)
        if record is not None:
            record.close()
    with _lock:
        if _cache is None:
            config = CacheConfig.from_environment(
                device_bytes=int(comfy.model_management.get_total_memory(device())),
                store_folder=store_location.folder(),
                source=store_location.source(),
                application=store_location.application(),
                management_modules=MANAGEMENT_MODULES,
                settings=user_settings.variables(),
                attribute_policy=ATTRIBUTES,
            )
            _cache = GraphCache(replace(config, spare_bytes=aimdo.headroom()), _available_bytes)
            _cache.after_capture = _show_memory
            _cache.stats.host.prompt_runs = messages.prompt_runs
            choices = None if config.store_folder is None else config.store_folder / "attention"
            chooser.use(choices, functools.partial(_cache.stats.stall, "measure"))
        return _cache


def _available_bytes(device: str) -> int:
    free = free_bytes(device)
    return free and free + aimdo.resident_bytes(device)


def _show_memory() -> None:
    """After a capture: let ComfyUI reclaim its memory. Otherwise captures keep their memory until Free Graphs.

    Core looks for loaded models on the device that needs memory, so each device has its own holder.
    """
    assert _cache is not None
    graph_cache = _cache
    try:
        from ..comfyui.memory_holder import MemoryHolder  # only here: it derives from a class of core's

        for name in graph_cache.bytes_by_device():
            if name not in _holders:
                held = functools.partial(_held_on, graph_cache, name)
                _holders[name] = MemoryHolder(torch.device(name), held, graph_cache.give_back)
            _holders[name].register()
    except Exception:  # a class of core's has changed; the prompt must not fail
        logger.warning("Resolute: ComfyUI cannot ask for the memory of captures", exc_info=True)
        graph_cache.after_capture = lambda: None


def _held_on(graph_cache: GraphCache, name: str) -> int:
    return graph_cache.bytes_by_device().get(name, 0)


def waiting_seconds() -> float:
    """The clock of waits: see `Stats.waiting_seconds`."""
    return cache().stats.waiting_seconds()


def device() -> torch.device:
    """The device on which ComfyUI runs models."""
    chosen: torch.device = comfy.model_management.get_torch_device()
    return chosen


def device_name() -> str:
    """The name under which measurements on this device are stored."""
    where = device()
    return torch.cuda.get_device_name(where) if where.type == "cuda" else where.type


# --- its modules -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ModuleRecord:
    """The programs, hooks and weights epoch of one module, shared by every clone that runs it."""

    owner: int  # the number of the module in this process
    weights: ModuleState
    # By the backend's name, the names of the left-out blocks, and the role of the node's request: a VAE of videos
    # encodes and decodes in one module.
    programs: dict[tuple[str, tuple[str, ...], Role], Program] = field(default_factory=dict)
    hooks: dict[tuple[str, tuple[str, ...], Role], ModuleHooks] = field(default_factory=dict)
    fingerprint: tuple[int, str] = (-1, "")  # the weights epoch in which it was computed, and the digest

    def close(self) -> None:
        """The module was garbage collected: drop the references to its blocks and weights.

        The rest waits for another collection, since a program refers to itself.
        """
        for program in self.programs.values():
            program.close()
        for hooks in self.hooks.values():
            hooks.close()
        self.weights.let_go()

    def structure(self) -> str:
        """The short fingerprint that `GraphKey.plain` writes as a shape's model; empty until a call computes it."""
        return self.fingerprint[1][:12]


def record_of(module: torch.nn.Module) -> ModuleRecord:
    """The record of a module, made at first use and dropped after the module was garbage collected."""
    global _cleaner
    config, counters = cache().config, cache().stats.counters
    with _lock:
        if module not in _owners:
            owner = next(_numbers)
            _owners[module] = owner
            unsupported = page_loading.why_unsupported()
            weights = ModuleState(
                module,
                config.trusted,
                page_loading.fill,
                unsupported=unsupported,
                counters=counters,
            )
            _records[owner] = ModuleRecord(owner, weights)
            weakref.finalize(module, _note_collected, owner)
            if _cleaner is None:
                collector.make_full_collections_rare()
                _cleaner = threading.Thread(target=_clean_up, name="resolute-clean-up", daemon=True)
                _cleaner.start()
                atexit.register(_end_cleaner, _cleaner)
        return _records[_owners[module]]


def hooks_for(module: torch.nn.Module, request: CompileRequest, backend: str) -> ModuleHooks:
    """The hooks of `module` for the program of a backend, made once."""
    record, key = record_of(module), (backend, request.left_out, request.role)
    if key not in record.hooks:
        record.hooks[key] = ModuleHooks(module, request.role, request.left_out, record.weights)
    return record.hooks[key]


def program_for(module: torch.nn.Module, request: CompileRequest, device: str) -> tuple[Program, str]:
    """The program that runs `module` for a node's request, made once, and the name of its backend.

    device: the type of device that the module runs on ("cuda"). Raises BackendUnavailableError.
    """
    graph_cache = cache()
    _drop_captures_of_collected(graph_cache)
    backend, capabilities = request.backend_on(device)
    record, key = record_of(module), (backend.name, request.left_out, request.role)
    if key not in record.programs:
        hooks = hooks_for(module, request, backend.name)
        record.programs[key] = backend.bind(record.owner, capabilities, hooks, graph_cache.stats, graph_cache.config)
    return record.programs[key], backend.name


class _EagerFallback(CudaGraphProgram):
    def __init__(self, owner: int, captures: bool) -> None:
        super().__init__(owner, Capabilities(available=True, compiles=True, captures=captures))
        self.ran_originals, self.ran_compiled = True, False

    def code_of(self, key: GraphKey) -> Code:
        return Code.MISSING


def fallback_program(module: torch.nn.Module, device: str) -> Program:
    """Make a fallback that runs a module eagerly while its backend is imported, captured if the device can capture."""
    return _EagerFallback(record_of(module).owner, CudaGraphBackend().probe(device).available)


def fingerprint_of(module: torch.nn.Module) -> str:
    """A digest of a module's structure: its classes, parameter shapes and settings, not the values of its weights.

    Computed once per weights epoch, because the settings may change between epochs.
    """
    record = record_of(module)
    if record.fingerprint[0] != record.weights.epoch:
        found = digest((type(module).__name__, structure_digest(module, policy=ATTRIBUTES)))
        record.fingerprint = record.weights.epoch, found
    return record.fingerprint[1]


def programs() -> dict[tuple[int, str, tuple[str, ...], Role], Program]:
    """Every program of the process, by its module's number, its backend's name, its left-out blocks, and its role."""
    return {
        (owner, *key): program
        for owner, record in list(_records.items())  # another thread may add one meanwhile
        for key, program in list(record.programs.items())
    }


# --- modules that were garbage collected -------------------------------------------------------------------------


def _note_collected(owner: int) -> None:
    _collected.append(owner)
    _wake.put(None)


def _clean_up() -> None:
    """Drop the captures of collected modules once no call runs, so that their memory does not wait for a prompt."""
    while True:
        _wake.get()
        if _ending.is_set():
            return
        try:
            _drop_captures_of_collected(cache())
        except Exception:
            logger.warning("Resolute: what belongs to a deleted model was not freed", exc_info=True)


def _end_cleaner(cleaner: threading.Thread) -> None:
    """Let the thread end by itself: if Python kills it while it deletes a graph, the process aborts."""
    _ending.set()
    _wake.put(None)
    cleaner.join(_END_SECONDS)


def _drop_captures_of_collected(graph_cache: GraphCache) -> None:
    """May block on a running compile, so `cache()`, which also serves HTTP requests, does not call it."""
    while (owner := _next(_to_forget)) is not None:
        graph_cache.forget(owner)


def _next(owners: collections.deque[int]) -> int | None:
    """Pop the oldest number; None if the deque is empty, perhaps because another thread popped the last one."""
    try:
        return owners.popleft()
    except IndexError:
        return None
