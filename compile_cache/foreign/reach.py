"""Which module-level functions the code of a model can reach, and whether another pack has exchanged one.

Packs assign to `comfy.ldm.modules.attention.optimized_attention` or `torch.nn.functional.scaled_dot_product_attention`
to put their own function there for everybody. Such an assignment changes no module of the model, so nothing else here
would notice it. The reach is found by reading names in code objects, without running anything: the global names and
attributes of every method of the model's classes, and of every function that these reach within their own package.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_ALWAYS_NATIVE = frozenset({"builtins", "torch", *sys.stdlib_module_names})


@dataclass(frozen=True, slots=True)
class Slot:
    """A module-level name that holds a function or a class: `module` is the name of the module."""

    module: str
    name: str

    def value(self) -> Any:
        """The object that the name holds now, None where it is gone."""
        return getattr(sys.modules.get(self.module), self.name, None)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class CodeReach:
    """The slots that some classes can reach, and what they held when this was made.

    foreign: slots that hold code of a package that nothing in the slot's own package imports.
    digest: what the slots hold, by name: the same in every process that binds the same functions.
    """

    def __init__(self, kinds: Iterable[type], left_out: Collection[str] = ()) -> None:
        """left_out: names of modules that compute nothing. Their functions are neither watched nor followed."""
        self.slots = sorted(_reachable(kinds, left_out), key=str)
        values = [slot.value() for slot in self.slots]
        self._held = [_reference(value) for value in values]
        self.foreign = tuple(slot for slot in self.slots if _is_foreign(slot))
        bound = [(str(slot), *_identity(value)) for slot, value in zip(self.slots, values, strict=True)]
        self.digest = hashlib.sha256(repr(bound).encode()).hexdigest()

    def has_changed(self) -> bool:
        """A slot holds another object than when this was made. Takes a tenth of a millisecond for a whole model."""
        return any(held() is not slot.value() for held, slot in zip(self._held, self.slots, strict=True))


class ReachCache:
    """The reach of classes, found once for each set of classes and again where something was exchanged.

    It keeps no class alive: one that is written in a function may hold a model. left_out: see CodeReach.
    """

    def __init__(self, left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        self._known: dict[frozenset[int], tuple[list[weakref.ref[type]], CodeReach]] = {}

    def of(self, kinds: Iterable[type]) -> CodeReach:
        """The present reach of some classes."""
        distinct = set(kinds)
        key = frozenset(map(id, distinct))
        refs, reach = self._known.get(key, ([], None))
        if reach is None or reach.has_changed() or any(ref() is None for ref in refs):
            reach = CodeReach(distinct, self._left_out)
            self._known[key] = ([weakref.ref(kind) for kind in distinct], reach)
        return reach


def class_code(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """Every function that is written in these classes or in their bases; of torch's own classes only their forwards."""
    seen: set[type] = set()
    for base in (base for kind in kinds for base in kind.__mro__ if base not in (torch.nn.Module, object)):
        if base in seen:
            continue
        seen.add(base)
        is_torch = _package(base.__module__) in _ALWAYS_NATIVE
        for name, value in vars(base).items():
            if not is_torch or "forward" in name:
                yield from _functions_in(value)


def string_constants(kinds: Iterable[type]) -> set[str]:
    """Every string that is written in the code of these classes: the keys that they can look up, for example."""
    return set().union(*(_strings(function.__code__) for function in class_code(kinds)))


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
    for slot in _reachable(kinds, ()):
        codes += [function.__code__ for function in _functions_of(slot.value())]
    return frozenset().union(*(_strings(code) | set(_names(code)) for code in codes))


def _reachable(kinds: Iterable[type], left_out: Collection[str]) -> set[Slot]:
    slots: set[Slot] = set()
    done: set[CodeType] = set()
    waiting = list(class_code(kinds))
    while waiting:
        function = waiting.pop()
        if function.__code__ in done:
            continue
        done.add(function.__code__)
        home = function.__globals__.get("__name__", "")
        for slot in _named_in(function):
            if slot in slots or slot.module in left_out:
                continue
            slots.add(slot)
            if _package(home) in _ALWAYS_NATIVE:
                continue
            waiting += [inner for inner in _functions_of(slot.value()) if _package(inner.__module__) == _package(home)]
        # A decorator's closure holds the function that it decorates.
        for cell in function.__closure__ or ():
            waiting += [inner for inner in _contents(cell) if _package(inner.__module__) == _package(home)]
    return slots


def _named_in(function: FunctionType) -> Iterator[Slot]:
    """The slots that a function names: globals, and attributes of modules that are globals."""
    names = set(_names(function.__code__))
    modules: list[ModuleType] = []
    seen: set[str] = set()
    home = function.__globals__.get("__name__")
    if isinstance(home, str) and home in sys.modules:
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                modules.append(value)
            elif _is_code(value):
                yield Slot(home, name)
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
            elif _is_code(value):
                yield Slot(module.__name__, name)


def _strings(code: CodeType) -> set[str]:
    found = {constant for constant in code.co_consts if isinstance(constant, str)}
    return found.union(*(_strings(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type, functools.partial)) or (
        callable(value) and not isinstance(value, torch.nn.Module)
    )


def _functions_of(value: Any) -> list[FunctionType]:
    """The Python functions behind a module-level value: itself, or the methods of a class that is no torch Module."""
    if isinstance(value, type):
        if issubclass(value, torch.nn.Module):
            return []  # where a model has one, its class is among the model's
        return [function for member in vars(value).values() for function in _functions_in(member)]
    return list(_functions_in(value))


def _functions_in(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, property):
        yield from (part for part in (value.fget, value.fset) if isinstance(part, FunctionType))
    if isinstance(value, FunctionType):
        yield value


def _contents(cell: Any) -> Iterator[FunctionType]:
    try:
        yield from _functions_in(cell.cell_contents)
    except ValueError:  # an empty cell
        return


def _is_foreign(slot: Slot) -> bool:
    package, own = _package(_home(slot.value())), _package(slot.module)
    if not package or package == own or package in _ALWAYS_NATIVE:
        return False
    # Core binds names of other packages too (comfy_kitchen's, sageattention's), sometimes by way of another module.
    modules = [slot.module]
    if own not in _ALWAYS_NATIVE:  # torch has thousands, and binds nothing of packs
        modules += [name for name in list(sys.modules) if _package(name) == own]
    return not any(_imports(module, package) for module in modules)


def _home(value: Any) -> str:
    """The module whose code a value runs. A decorator copies `__module__` to its wrapper, its globals it cannot."""
    for function in _functions_in(value):
        return str(function.__globals__.get("__name__", ""))
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, (BuiltinFunctionType, type)) or kind.__module__ == "builtins":
        return str(getattr(value, "__module__", None) or "")
    return str(kind.__module__)


@functools.cache
def _imports(module: str, package: str) -> bool:
    """The source of a module imports a package, anywhere in the file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        source = Path(file or "").read_text(encoding="utf-8", errors="replace")
    except OSError:  # gone, or no file
        return False
    return re.search(rf"^\s*(?:from|import)\s+{re.escape(package)}\b", source, re.MULTILINE) is not None


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _identity(value: Any) -> tuple[str, str]:
    return _home(value), str(getattr(value, "__qualname__", type(value).__qualname__))


def _reference(value: Any) -> Any:
    """Remembers an object without keeping it alive: a closure of another pack may hold a model."""
    try:
        return weakref.ref(value)
    except TypeError:  # a builtin or a C object: it lives as long as its module
        return lambda: value
