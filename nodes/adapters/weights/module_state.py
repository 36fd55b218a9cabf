"""What decides how the modules of a model compute, besides their weights; cheap to read while nothing changes."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from itertools import islice
from operator import is_
from typing import Any

import torch

from ....compile_cache.regions.foreign_code import ForeignCode, marks_on
from ....compile_cache.regions.structure import VOLATILE, settings

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
        foreign_code = ForeignCode()
        return [self._state(module, module is root, cached.get(id(module)), foreign_code) for module in modules]

    def _state(
        self, module: torch.nn.Module, is_root: bool, cached: _Attributes | None, foreign_code: ForeignCode
    ) -> ModuleState:
        attributes = vars(module)
        if cached is None or not cached.match(module):
            cached = _Attributes(module, is_root)
        if cached.cacheable:
            self._cached[id(module)] = cached
        return (
            id(module),
            cached.marks + foreign_code.marks_around(module, is_root),
            cached.settings,
            getattr(module, "comfy_cast_weights", None) if hasattr(type(module), "comfy_cast_weights") else None,
            len(attributes.get("weight_function") or ()),
            len(attributes.get("bias_function") or ()),
            "_v" in attributes,
        )


class _Attributes:
    """The attributes of a module, and what was derived from them.

    cacheable: no attribute can change in place, and none keeps something alive (such as the model), so they may be kept
    to compare with.
    """

    __slots__ = ("_module", "_names", "_own", "cacheable", "marks", "settings")

    def __init__(self, module: torch.nn.Module, is_root: bool) -> None:
        attributes = vars(module)
        self._module = weakref.ref(module)
        self._names, self._own = list(attributes), _own(attributes)
        self.settings = settings(module, is_root)
        self.marks = marks_on(module, is_root)
        self.cacheable = self._names[:_TORCH_COUNT] == _TORCH_NAMES and all(
            _is_fixed(value) or (isinstance(value, _Container) and name in VOLATILE)
            for name, value in zip(self._names[_TORCH_COUNT:], self._own, strict=True)
        )

    def match(self, module: torch.nn.Module) -> bool:
        """Whether the module still has these very attributes."""
        attributes = vars(module)
        return (
            self._module() is module and list(attributes) == self._names and all(map(is_, _own(attributes), self._own))
        )


# Torch's own attributes (weights, hooks, children) come first in a module, and are read separately.
_TORCH_NAMES = list(vars(torch.nn.Module()))
_TORCH_COUNT = len(_TORCH_NAMES)
_FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


class _Container:
    """Placeholder for a mutable container, so that we keep no reference to the model."""


_CONTAINERS = {kind: _Container() for kind in (list, dict, set)}


def _own(attributes: dict[str, Any]) -> list[Any]:
    return [_CONTAINERS.get(type(value), value) for value in islice(attributes.values(), _TORCH_COUNT, None)]


def _is_fixed(value: object) -> bool:
    if isinstance(value, type):
        # A class defined in a function may keep that function's variables alive.
        return "<locals>" not in value.__qualname__
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)
