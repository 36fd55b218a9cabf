"""The state that decides how a model's modules compute, besides weights; cheap to read while nothing changes."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterable
from itertools import islice
from operator import is_
from typing import Any

import torch

from ....compile_cache.foreign.attributes import marks_around, marks_on
from ....compile_cache.regions.structure import settings
from ..comfyui import module_attributes
from ..comfyui.module_attributes import ATTRIBUTES

# The state of one module, to compare with an earlier one: its identity first, marks of foreign code second.
ModuleState = tuple[Any, ...]


class ModuleStateReader:
    """Reads the states of a model's modules, once in every sampling run.

    What it derives from a module's attributes is cached until one of them is replaced, unless an attribute could change
    in place or keep the model alive.
    """

    def __init__(self) -> None:
        self._cached: dict[int, _Attributes] = {}

    def read(self, modules: Iterable[torch.nn.Module], root: torch.nn.Module) -> list[ModuleState]:
        """One state for each module, in their order. root: the module that runs through the cache."""
        cached, self._cached = self._cached, {}
        return [self._state(module, module is root, cached.get(id(module))) for module in modules]

    def _state(self, module: torch.nn.Module, is_root: bool, cached: _Attributes | None) -> ModuleState:
        attributes = vars(module)
        if cached is None or not cached.match(module):
            cached = _Attributes(module, is_root)
        if cached.cacheable:
            self._cached[id(module)] = cached
        return (
            id(module),
            cached.marks + marks_around(module, is_root),
            cached.settings,
            ATTRIBUTES.casts_now(module) if hasattr(type(module), module_attributes.CASTS) else None,
            *[len(attributes.get(name) or ()) for name in module_attributes.WEIGHT_PATCHES],
        )


class _Attributes:
    """The attributes of a module, and what was derived from them.

    cacheable: no attribute can change in place, and none keeps something alive (such as the model), so they may be kept
    to compare with.
    """

    __slots__ = ("_module", "_names", "_own", "cacheable", "marks", "settings")

    def __init__(self, module: torch.nn.Module, is_root: bool) -> None:
        self._module = weakref.ref(module)
        self._names, self._own = _own(module)
        self.settings = settings(module, is_root, ATTRIBUTES)
        self.marks = marks_on(module, is_root)
        torchs = list(islice(vars(module), _TORCH_COUNT))
        self.cacheable = torchs == _TORCH_NAMES and all(map(is_fixed, self._own))

    def match(self, module: torch.nn.Module) -> bool:
        """True if the module still has these very attributes."""
        names, own = _own(module)
        return self._module() is module and names == self._names and all(map(is_, own, self._own))


# Torch's own attributes (weights, hooks, children) come first in a module, and are read separately.
_TORCH_NAMES = list(vars(torch.nn.Module()))
_TORCH_COUNT = len(_TORCH_NAMES)
_FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


_counts = functools.cache(lambda name: not ATTRIBUTES.is_bookkeeping(name))


def _own(module: torch.nn.Module) -> tuple[list[str], list[Any]]:
    """The names and values of the attributes that are neither torch's nor bookkeeping."""
    own = [(name, value) for name, value in islice(vars(module).items(), _TORCH_COUNT, None) if _counts(name)]
    return [name for name, _ in own], [_CONTAINERS.get(type(value), value) for _, value in own]


class _Container:
    """Placeholder for a mutable container, so that we keep no reference to the model."""


_CONTAINERS = {kind: _Container() for kind in (list, dict, set)}


def is_fixed(value: object) -> bool:
    """A value cannot change in place, and keeps nothing alive."""
    if isinstance(value, type):
        # A class defined in a function may keep that function's variables alive.
        return "<locals>" not in value.__qualname__
    if type(value) is tuple:
        return all(map(is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)
