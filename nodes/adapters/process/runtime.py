"""The one GraphCache of the process, and what the process keeps for each module that runs through it."""

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
from ....compile_cache.calls.cache import GraphCache
from ....compile_cache.captures.captures import free_bytes
from ....compile_cache.config import CacheConfig
from ....compile_cache.keys import GraphKey, Role, digest
from ....compile_cache.regions.structure import structure_digest
from ..comfyui import dynamic_vram, messages, page_loading, version
from ..comfyui.module_attributes import ATTRIBUTES
from ..foreign.model_code import MANAGEMENT_MODULES
from ..weights.module_state import ModuleState
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
# drops what belongs to it, unless a caller of `cache` does so first.
_collected: collections.deque[int] = collections.deque()
_to_forget: collections.deque[int] = collections.deque()  # those whose captures are not dropped yet
_wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is reentrant, so a finalizer may call it
_cleaner: threading.Thread | None = None
_ending = threading.Event()
_END_SECONDS = 10.0  # that the thread may take to end


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
                application=f"ComfyUI {version.of_comfyui()}",
                management_modules=MANAGEMENT_MODULES,
                settings=user_settings.variables(),
                attribute_policy=ATTRIBUTES,
            )
            _cache = GraphCache(replace(config, spare_bytes=dynamic_vram.headroom()), _within_reach)
            _cache.after_capture = _show_memory
            _cache.stats.host.prompt_runs = messages.prompt_runs
            choices = None if config.store_folder is None else config.store_folder / "attention"
            chooser.use(choices, functools.partial(_cache.stats.stall, "measure"))
        return _cache


def _within_reach(device: str) -> int:
    free = free_bytes(device)
    return free and free + dynamic_vram.resident_bytes(device)


def _show_memory() -> None:
    """A capture was made: let ComfyUI ask for its memory. Without that, captures keep theirs until Free Graphs.

    Core asks what is loaded on the device that needs memory, so each device has a holder of its own.
    """
    assert _cache is not None
    graph_cache = _cache
    try:
        from ..comfyui.memory_holder import MemoryHolder  # only here: it derives from a class of core's

        for name in graph_cache.bytes_by_device():
            if name not in _holders:
                held = functools.partial(_held_on, graph_cache, name)
                _holders[name] = MemoryHolder(torch.device(name), held, graph_cache.give_back)
            _holders[name].show()
    except Exception:  # a class of core's has changed, which must not cost the picture
        logger.warning("Resolute: ComfyUI cannot ask for the memory of captures", exc_info=True)
        graph_cache.after_capture = lambda: None


def _held_on(graph_cache: GraphCache, name: str) -> int:
    return graph_cache.bytes_by_device().get(name, 0)


def waiting_seconds() -> float:
    """The clock of waits: see `Stats.waiting_seconds`."""
    return cache().stats.waiting_seconds()


def device() -> torch.device:
    """Where ComfyUI runs models."""
    chosen: torch.device = comfy.model_management.get_torch_device()
    return chosen


def device_name() -> str:
    """Numbers that were measured on this device are kept under this name."""
    where = device()
    return torch.cuda.get_device_name(where) if where.type == "cuda" else where.type


# --- its modules -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ModuleRecord:
    """The programs, hooks and weights epoch of one module, shared by every clone that runs it."""

    owner: int  # the number of the module in this process
    weights: ModuleState
    # By the name of the backend, the names of the blocks that are left out, and the role that the node asked for: a VAE
    # of videos is one module for both ways.
    programs: dict[tuple[str, tuple[str, ...], Role], Program] = field(default_factory=dict)
    hooks: dict[tuple[str, tuple[str, ...], Role], ModuleHooks] = field(default_factory=dict)
    fingerprint: tuple[int, str] = (-1, "")  # the weights epoch in which it was computed, and the digest

    def close(self) -> None:
        """The module was garbage collected: let go of its blocks and weights.

        What is left here waits for another collection, since a program refers to itself.
        """
        for program in self.programs.values():
            program.close()
        for hooks in self.hooks.values():
            hooks.close()
        self.weights.let_go()

    def structure(self) -> str:
        """The model of a shape, as `GraphKey.plain` writes it; empty if no call needed the fingerprint yet."""
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
                collector.leave_prompts_alone()
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
    """The program that runs `module` as a node asked for, made once, and the name of its backend.

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


class _StandIn(CudaGraphProgram):
    def __init__(self, owner: int, captures: bool) -> None:
        super().__init__(owner, Capabilities(available=True, compiles=True, captures=captures))
        self.ran_originals, self.ran_compiled = True, False

    def code_of(self, key: GraphKey) -> Code:
        return Code.COMING


def stand_in_for(module: torch.nn.Module, device: str) -> Program:
    """Make a program that runs a module's originals while its backend is imported, as captures where the device can."""
    return _StandIn(record_of(module).owner, CudaGraphBackend().probe(device).available)


def fingerprint_of(module: torch.nn.Module) -> str:
    """A digest of a module's structure: its classes, parameter shapes and settings, not the values of its weights.

    Computed once per weights epoch, because its settings may change in between.
    """
    record = record_of(module)
    if record.fingerprint[0] != record.weights.epoch:
        found = digest((type(module).__name__, structure_digest(module, policy=ATTRIBUTES)))
        record.fingerprint = record.weights.epoch, found
    return record.fingerprint[1]


def programs() -> dict[tuple[int, str, tuple[str, ...], Role], Program]:
    """Every program of the process, by the number of its module, its backend's name, what is left out, and its role."""
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
    """Drop what belongs to collected modules as soon as no call runs, so that its memory does not wait for a prompt."""
    while True:
        _wake.get()
        if _ending.is_set():
            return
        try:
            _drop_captures_of_collected(cache())
        except Exception:
            logger.warning("Resolute: what belongs to a deleted model was not freed", exc_info=True)


def _end_cleaner(cleaner: threading.Thread) -> None:
    """Let the thread end by itself: if Python ends one that deletes a graph, the process aborts."""
    _ending.set()
    _wake.put(None)
    cleaner.join(_END_SECONDS)


def _drop_captures_of_collected(graph_cache: GraphCache) -> None:
    """Not in `cache()`, which serves requests too: it may have to wait for a compile that runs."""
    while (owner := _next(_to_forget)) is not None:
        graph_cache.forget(owner)


def _next(owners: collections.deque[int]) -> int | None:
    """Take the oldest one; None if there is none, perhaps because another thread took the last."""
    try:
        return owners.popleft()
    except IndexError:
        return None
