"""The one cache of the process, and the programs that run through it."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from typing import Any

import comfy.model_management
import torch

from ...compile_cache.backends import registry
from ...compile_cache.backends.base import Program
from ...compile_cache.cache import GraphCache
from ...compile_cache.config import CacheConfig
from ...compile_cache.fingerprint import ModelFingerprint
from ...compile_cache.regions import HookBuilder
from ...compile_cache.structure import structure_digest
from . import persistence, readiness
from .residency import Residency

_lock = threading.Lock()
_cache: GraphCache | None = None
_owners: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_programs: dict[tuple[int, str], Program] = {}
_fingerprints: dict[int, tuple[int, ModelFingerprint]] = {}  # by owner, with the epoch that it was taken in
_residencies: dict[int, Residency] = {}
_numbers = itertools.count(1)
# Numbers of modules that died. Garbage is collected in any thread at any moment, also in one that a compile waits for
# while this pack's locks are held: so whoever finds a module dead only notes it, and the next caller cleans up.
_dead: collections.deque[int] = collections.deque()
_gone: collections.deque[int] = collections.deque()  # of those, whose captures are still to be dropped


def cache() -> GraphCache:
    """The process's GraphCache, made at first use."""
    global _cache
    while _dead:
        _let_go(_dead.popleft())
    with _lock:
        if _cache is None:
            total = int(comfy.model_management.get_total_memory(_device()))
            _cache = GraphCache(CacheConfig.from_environment(None, total, persistence.folder(), persistence.source()))
        return _cache


def owner_of(module: torch.nn.Module) -> int:
    """A number for a module of this process. When the module dies, everything that belongs to it goes too."""
    with _lock:
        number = _owners.get(module)
        if number is None:
            number = next(_numbers)
            _owners[module] = number
            weakref.finalize(module, _dead.append, number)
        return number


def program_for(module: torch.nn.Module, backend: str, device: str, build_hooks: HookBuilder) -> tuple[Program, str]:
    """The program that runs `module` through a backend, made once, and the name of the backend that it is.

    Raises UnknownBackendError or BackendUnavailableError for a backend that was asked for by name.
    """
    graph_cache = cache()
    _bury(graph_cache)
    chosen, capabilities, _ = registry.resolve(backend, device)
    owner = owner_of(module)
    program = _programs.get((owner, chosen.name))
    if program is None:
        program = chosen.bind(owner, capabilities, build_hooks, graph_cache.stats, graph_cache.config)
        _programs[owner, chosen.name] = program
    return program, chosen.name


def residency_of(module: torch.nn.Module) -> Residency:
    """The one Residency of a module, shared by every clone that runs it."""
    owner = owner_of(module)
    with _lock:
        if owner not in _residencies:
            _residencies[owner] = Residency(module)
        return _residencies[owner]


def fingerprint_of(module: torch.nn.Module) -> ModelFingerprint:
    """The structure of a module, computed once per weights epoch: a setting of it may change."""
    owner, epoch = owner_of(module), residency_of(module).epoch
    known = _fingerprints.get(owner)
    if known is None or known[0] != epoch:
        known = (epoch, ModelFingerprint(type(module).__name__, structure_digest(module)))
        _fingerprints[owner] = known
    return known[1]


def report() -> dict[str, Any]:
    """The cache's report, with the regions of each module that has a program."""
    told = cache().report()
    modules = [
        {"module": owner, "backend": backend, "regions_compiled": program.regions[0], "regions": program.regions[1]}
        for (owner, backend), program in list(_programs.items())
    ]
    stored: dict[str, int] = {}
    for name in {backend for _, backend in list(_programs)}:
        stored |= registry.get(name).stored()
    return {**told, "modules": modules, "store": stored, "models": readiness.models(cache(), _device())}


def ready_sizes() -> list[tuple[int, int]]:
    """(width, height) of latents that a diffusion model samples without a stall; see `readiness.sizes`."""
    return readiness.sizes(cache(), _device())


def _device() -> torch.device:
    device: torch.device = comfy.model_management.get_torch_device()
    return device


def _let_go(owner: int) -> None:
    _gone.append(owner)
    _fingerprints.pop(owner, None)
    _residencies.pop(owner, None)
    for key in [key for key in list(_programs) if key[0] == owner]:  # another thread may add one meanwhile
        _programs.pop(key, None)


def _bury(graph_cache: GraphCache) -> None:
    """Drop the captures of modules that died. It may wait for a compile that runs, so no request does it."""
    while _gone:
        graph_cache.forget(_gone.popleft())
