"""Find what the code of classes can reach at module level: by the names in code objects, without running anything.

From every method of the classes it follows global names and attributes of modules to functions and data, and goes on
into the functions of the same package.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .functions import changes, class_code, closed_over, functions_in, names_in, strings_in
from .names import NATIVE, origin, package_of

DATA = (
    type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, torch.dtype, torch.device,
    torch.Tensor, enum.Enum,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A module-level name that holds a function, a class or data: `module` is the name of the module."""

    module: str
    name: str

    def value(self) -> Any:
        """The object that the name holds now, None where it is gone."""
        return getattr(sys.modules.get(self.module), self.name, None)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Reachable:
    """code: names of functions and classes. data: names of data that the code only reads. classes: those of `code`
    that are no torch Modules, in packages that are followed. functions: all Python functions, by address.
    """

    code: set[GlobalName] = field(default_factory=set)
    data: set[GlobalName] = field(default_factory=set)
    classes: dict[type, None] = field(default_factory=dict)
    functions: dict[int, FunctionType] = field(default_factory=dict)


def reachable(kinds: Iterable[type], left_out: Collection[str] = ()) -> Reachable:
    """left_out: modules and functions ("package.module.function") that compute nothing. They are not followed."""
    found = Reachable()
    own_memory: set[GlobalName] = set()
    waiting = list(class_code(kinds))
    while waiting:
        function = waiting.pop()
        if id(function) in found.functions:
            continue
        found.functions[id(function)] = function
        home = package_of(function.__globals__.get("__name__"))
        for place, value in _named_in(function):
            if place in found.code or place.module in left_out or str(place) in left_out:
                continue
            if not is_code(value):
                if package_of(place.module) not in NATIVE and isinstance(value, DATA):
                    found.data.add(place)
                    if changes(function.__code__, place.name):
                        own_memory.add(place)
                continue
            found.code.add(place)
            if home in NATIVE:
                continue
            is_helper = isinstance(value, type) and not issubclass(value, torch.nn.Module)
            if is_helper and package_of(value.__module__) == home:
                found.classes[value] = None
            waiting += [each for each in functions_of(value) if origin(each) == home]
        # A decorator's closure holds the function that it decorates. Torch's decorators are around code of any package.
        waiting += [each for each in closed_over(function) if home in NATIVE or origin(each) == home]
    found.data -= own_memory  # a cache, for example: what it holds is what the code made itself
    return found


def names_read(kinds: Collection[type]) -> frozenset[str]:
    """Every name and string in the code that modules of these classes can run once they are made.

    An attribute that is not among them has no effect. What only `__init__` uses is left out, but for the functions that
    are written in it.
    """
    codes: list[CodeType] = []
    for function in class_code(kinds):
        code = function.__code__
        is_maker = function.__name__ == "__init__"
        codes += [each for each in code.co_consts if isinstance(each, CodeType)] if is_maker else [code]
    for place in reachable(kinds).code:
        codes += [function.__code__ for function in functions_of(place.value())]
    return frozenset().union(*(strings_in(code) | set(names_in(code)) for code in codes))


def functions_of(value: Any) -> list[FunctionType]:
    """The Python functions behind a module-level value: itself, or the methods of a class that is no torch Module."""
    if isinstance(value, type):
        if issubclass(value, torch.nn.Module):
            return []  # where a model has one, its class is among the model's
        return [function for member in list(vars(value).values()) for function in functions_in(member)]
    return list(functions_in(value))


def is_code(value: Any) -> bool:
    """A function, a class, or an object that can be called."""
    return isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type, functools.partial)) or (
        callable(value) and not isinstance(value, torch.nn.Module)
    )


def _named_in(function: FunctionType) -> Iterator[tuple[GlobalName, Any]]:
    """The global names in a function, and what they hold: globals, and attributes of modules that are globals."""
    names = set(names_in(function.__code__))
    modules: list[ModuleType] = []
    seen: set[str] = set()
    home = function.__globals__.get("__name__")
    if isinstance(home, str) and home in sys.modules:
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                modules.append(value)
            else:
                yield GlobalName(home, name), value
    while modules:
        module = modules.pop()
        if module.__name__ in seen or sys.modules.get(module.__name__) is not module:
            continue
        seen.add(module.__name__)
        held = vars(module)
        for name in names & held.keys():
            value = held[name]
            if isinstance(value, ModuleType):
                modules.append(value)
            else:
                yield GlobalName(module.__name__, name), value
