"""Cheap comparisons by identity: has a class, a function or data changed since it was digested?

Nothing here keeps a function, a class or data alive, because a closure of another pack may hold a model. A code object
holds constants alone, so it is kept: its address cannot become another one's.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from .functions import changes, functions_in
from .names import NATIVE, package_of
from .reachable import DATA

_GONE = object()
_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


class FunctionWatch:
    """One function: its code, its defaults, and what it closes over."""

    __slots__ = ("_closure", "_code", "_defaults", "_function")

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self._code = function.__code__
        self._defaults = id(function.__defaults__), id(function.__kwdefaults__)
        self._closure = _contents(function)

    def is_changed_to(self, now: FunctionType) -> bool:
        """Another function is in its place, or it has changed."""
        return now is not self._function() or self.has_changed()

    def has_changed(self) -> bool:
        function = self._function()
        return (
            function is None
            or function.__code__ is not self._code
            or (id(function.__defaults__), id(function.__kwdefaults__)) != self._defaults
            or (function.__closure__ is not None and _contents(function) != self._closure)
        )


class ClassWatch:
    """The code in the dictionary of one class, and the data there that its code only reads."""

    __slots__ = ("_class", "_code", "_data", "_names")

    def __init__(self, kind: type) -> None:
        self._class = weakref.ref(kind)
        code, data = members_of(kind)
        self._code = [(name, Held(value)) for name, value in code]
        self._data = [(name, identity(value)) for name, value in data]
        self._names = len(vars(kind))

    def has_changed(self) -> bool:
        kind = self._class()
        if kind is None:
            return True
        held = vars(kind)
        if any(before.has_changed(held.get(name)) for name, before in self._code):
            return True
        if any(identity(held.get(name)) != before for name, before in self._data):
            return True
        if len(held) == self._names:
            return False
        # `copy.deepcopy` adds a name to the class. That is no code, and no data that code reads.
        self._names = len(held)
        code, data = members_of(kind)
        return (len(code), len(data)) != (len(self._code), len(self._data))


def members_of(kind: type) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The code in the dictionary of a class, and the data that its code only reads, each by name."""
    members = sorted(vars(kind).items())
    code = [
        (name, value) for name, value in members if any(True for _ in functions_in(value)) or isinstance(value, type)
    ]
    if package_of(kind.__module__) in NATIVE:
        return code, []
    functions = [function for _, value in code for function in functions_in(value)]
    data = [
        (name, value)
        for name, value in members
        if not (name.startswith("__") and name.endswith("__")) and isinstance(value, DATA)
        if not any(changes(function.__code__, name) for function in functions)
    ]
    return code, data


class Held:
    """The object that a name held, and the functions behind it with their code."""

    __slots__ = ("_address", "_functions", "_object")

    def __init__(self, value: Any) -> None:
        self._address = id(value)
        self._functions = [FunctionWatch(function) for function in functions_in(value)]
        try:
            self._object: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # a builtin or a C object lives as long as its module, and a property has functions
            self._object = (lambda: _GONE) if self._functions else (lambda: value)

    def has_changed(self, value: Any) -> bool:
        """The name holds another object now, or one with another code."""
        if id(value) != self._address:
            return True
        held = self._object()
        if held is value:
            return any(watch.has_changed() for watch in self._functions)
        functions = [] if held is not _GONE else list(functions_in(value))
        return len(functions) != len(self._functions) or any(
            watch.is_changed_to(function) for watch, function in zip(self._functions, functions, strict=True)
        )


def identity(value: Any) -> Any:
    """Equal to an earlier one if data is the same. A container counts by its items."""
    if isinstance(value, _FIXED):
        return (type(value), repr(value)) if isinstance(value, (float, complex)) else (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), [identity(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(id, value)))
    if isinstance(value, dict):
        return (dict, [(identity(key), identity(item)) for key, item in value.items()])
    if isinstance(value, torch.Tensor):
        return (id(value), None if value.is_inference() else value._version)
    return id(value)


def _contents(function: FunctionType) -> tuple[int, ...]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(id(cell.cell_contents))
        except ValueError:  # an empty cell
            found.append(0)
    return tuple(found)
