"""The one cache of the process, and the programs that run through it."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref

import comfy.model_management
import torch

from ....compile_cache.backends import registry
from ....compile_cache.backends.base import Program
from ....compile_cache.cache import GraphCache
from ....compile_cache.config import CacheConfig
from ....compile_cache.regions.region import HookBuilder
from ....compile_cache.regions.structure import structure_digest
from ....compile_cache.store.fingerprint import ModelFingerprint
from ..weights.model_code import MANAGEMENT_MODULES
from ..weights.weights_epoch import WeightsTracker
from . import store_location

_lock = threading.Lock()
_cache: GraphCache | None = None
_owners: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_programs: dict[tuple[int, str], Program] = {}
_fingerprints: dict[int, tuple[int, ModelFingerprint]] = {}  # by owner, with the epoch that it was taken in
_weights: dict[int, WeightsTracker] = {}
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
            total = int(comfy.model_management.get_total_memory(device()))
            _cache = GraphCache(
                CacheConfig.from_environment(
                    None, total, store_location.folder(), store_location.source(), MANAGEMENT_MODULES
                )
            )
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


def weights_of(module: torch.nn.Module) -> WeightsTracker:
    """The one WeightsTracker of a module, shared by every clone that runs it."""
    owner, trusted = owner_of(module), cache().config.trusted_classes
    with _lock:
        if owner not in _weights:
            _weights[owner] = WeightsTracker(module, trusted)
        return _weights[owner]


def fingerprint_of(module: torch.nn.Module) -> ModelFingerprint:
    """The structure of a module, computed once per weights epoch: a setting of it may change."""
    owner, epoch = owner_of(module), weights_of(module).epoch
    known = _fingerprints.get(owner)
    if known is None or known[0] != epoch:
        known = (epoch, ModelFingerprint(type(module).__name__, structure_digest(module)))
        _fingerprints[owner] = known
    return known[1]


def programs() -> dict[tuple[int, str], Program]:
    """Every program of the process, by the number of its module and the name of its backend."""
    return dict(_programs)


def device() -> torch.device:
    """Where ComfyUI runs models."""
    chosen: torch.device = comfy.model_management.get_torch_device()
    return chosen


def _let_go(owner: int) -> None:
    _gone.append(owner)
    _fingerprints.pop(owner, None)
    _weights.pop(owner, None)
    for key in [key for key in list(_programs) if key[0] == owner]:  # another thread may add one meanwhile
        _programs.pop(key, None)


def _bury(graph_cache: GraphCache) -> None:
    """Drop the captures of modules that died. It may wait for a compile that runs, so no request does it."""
    while _gone:
        graph_cache.forget(_gone.popleft())
