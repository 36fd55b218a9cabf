"""The state that decides how a model's modules compute, besides weights; cheap to read while nothing changes."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch

from ....compile_cache.foreign.attributes import marks_around, marks_on
from ....compile_cache.regions.structure import TORCH_OWN, settings
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
        own = module.__dict__
        if cached is None or not cached.match(module, own):
            cached = _Attributes(module, is_root)
        if cached.cacheable:
            self._cached[id(module)] = cached
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        return (
            id(module),
            cached.marks + marks_around(module, is_root) if has_hooks else cached.marks,
            cached.settings,
            ATTRIBUTES.casts_now(module) if cached.may_cast else None,
            [(name, len(own[name])) for name in module_attributes.WEIGHT_PATCHES if own.get(name)],
        )


class _Attributes:
    """The attributes of a module, and what was derived from them.

    cacheable: no attribute can change in place, and none keeps something alive (such as the model), so they may be kept
    to compare with.
    """

    __slots__ = ("_get", "_known", "_module", "_values", "cacheable", "marks", "may_cast", "settings")

    def __init__(self, module: torch.nn.Module, is_root: bool) -> None:
        own = module.__dict__
        self._module = weakref.ref(module)
        self._known = frozenset(own)
        self._get = getter([name for name in own if _counts(name)])
        self._values = self._get(own)
        self.settings = settings(module, is_root, ATTRIBUTES)
        self.marks = marks_on(module, is_root)
        self.may_cast = hasattr(type(module), module_attributes.CASTS)
        self.cacheable = all(map(is_fixed, self._values))

    def match(self, module: torch.nn.Module, own: dict[str, Any]) -> bool:
        """True if the module still has these very attributes, besides torch's and bookkeeping."""
        if self._module() is not module:
            return False
        if not own.keys() <= self._known:
            if any(map(_counts, own.keys() - self._known)):
                return False
            self._known |= own.keys()
        try:
            return all(map(is_, self._get(own), self._values))
        except KeyError:
            return False


# Torch's own attributes (weights, hooks, children) are read separately.
_FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_counts = functools.cache(lambda name: name not in TORCH_OWN and not ATTRIBUTES.is_bookkeeping(name))
Getter = Callable[[Any], tuple[Any, ...]]


def getter(keys: Sequence[Any]) -> Getter:
    """A function that gets the items of these keys as a tuple."""
    if len(keys) == 1:  # itemgetter would return no tuple
        return lambda container: (container[keys[0]],)
    return itemgetter(*keys) if keys else nothing


def nothing(_: Any) -> tuple[Any, ...]:
    return ()


def is_fixed(value: object) -> bool:
    """A value cannot change in place, and keeps nothing alive."""
    if isinstance(value, type):
        # A class defined in a function may keep that function's variables alive.
        return "<locals>" not in value.__qualname__
    if type(value) is tuple:
        return all(map(is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)
