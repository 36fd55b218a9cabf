"""What decides how the modules of a model compute, besides their weights: quick to read while nothing changes."""

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

# The condition of one module, to be compared with another one of the same; its identity first, its foreign code second.
ModuleState = tuple[Any, ...]


class ModuleStates:
    """Reads the conditions of one model's modules, once in every sampling run.

    What the attributes of a module say is worked out once, and again when one of them was exchanged. Where one could
    change in place, or hold on to the model, it is worked out each time.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Attributes] = {}

    def read(self, modules: Iterable[torch.nn.Module], root: torch.nn.Module) -> list[ModuleState]:
        known, self._known = self._known, {}
        look = ForeignCode()
        return [self._condition(module, module is root, known.get(id(module)), look) for module in modules]

    def _condition(
        self, module: torch.nn.Module, is_root: bool, known: _Attributes | None, look: ForeignCode
    ) -> ModuleState:
        attributes = vars(module)
        if known is None or not known.are_those_of(module):
            known = _Attributes(module, is_root)
        if known.lasting:
            self._known[id(module)] = known
        return (
            id(module),
            known.marks + look.marks_around(module, is_root),
            known.settings,
            getattr(module, "comfy_cast_weights", None) if hasattr(type(module), "comfy_cast_weights") else None,
            len(attributes.get("weight_function") or ()),
            len(attributes.get("bias_function") or ()),
            "_v" in attributes,
        )


class _Attributes:
    """The attributes of a module, and what they say.

    lasting: none changes but by being exchanged, and none refers to anything that it would keep alive, such as the
    model itself; so they may be kept to compare with.
    """

    __slots__ = ("_module", "_names", "_own", "lasting", "marks", "settings")

    def __init__(self, module: torch.nn.Module, is_root: bool) -> None:
        attributes = vars(module)
        self._module = weakref.ref(module)
        self._names, self._own = list(attributes), _own(attributes)
        self.settings = settings(module, is_root)
        self.marks = marks_on(module, is_root)
        self.lasting = self._names[:_TORCHS] == _TORCHS_NAMES and all(
            _is_fixed(value) or (isinstance(value, _Container) and name in VOLATILE)
            for name, value in zip(self._names[_TORCHS:], self._own, strict=True)
        )

    def are_those_of(self, module: torch.nn.Module) -> bool:
        attributes = vars(module)
        return (
            self._module() is module and list(attributes) == self._names and all(map(is_, _own(attributes), self._own))
        )


# Torch's own attributes are a module's first, and are looked at by themselves: weights, hooks, children.
_TORCHS_NAMES = list(vars(torch.nn.Module()))
_TORCHS = len(_TORCHS_NAMES)
_FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


class _Container:
    """In place of one that somebody may put the model into later."""


_CONTAINERS = {kind: _Container() for kind in (list, dict, set)}


def _own(attributes: dict[str, Any]) -> list[Any]:
    return [_CONTAINERS.get(type(value), value) for value in islice(attributes.values(), _TORCHS, None)]


def _is_fixed(value: object) -> bool:
    if isinstance(value, type):
        return "<locals>" not in value.__qualname__  # what is written in a function may hold on to anything there
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)
