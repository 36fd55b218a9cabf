"""The Python functions behind a value: through methods, properties, partials, caches, and decorators' closures."""

from __future__ import annotations

import dis
import functools
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from .content import CONTAINERS, LruCache, defaults_of
from .names import NATIVE, package_of

_CHANGING = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"}
)
_NO_STEP = frozenset({"CACHE", "NOP", "RESUME", "EXTENDED_ARG"})
_MOST_STEPS = 16  # of the key in `container[key] = value`


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions that a value is, or stands for; none for a class, a builtin or an object."""
    while True:
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, LruCache):
            value = value.__wrapped__
        else:
            break
    if isinstance(value, property):
        yield from (part for part in (value.fget, value.fset) if isinstance(part, FunctionType))
    if isinstance(value, FunctionType):
        yield value


def closed_over(function: FunctionType) -> Iterator[FunctionType]:
    """The functions in the closure of a function: what a decorator decorates is there."""
    for cell in function.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield from functions_in(contents)


def chain(value: Any) -> list[FunctionType]:
    """The functions behind a value, and all that these close over."""
    found: dict[int, FunctionType] = {}
    waiting = list(functions_in(value))
    while waiting:
        function = waiting.pop()
        if id(function) not in found:
            found[id(function)] = function
            waiting += closed_over(function)
    return list(found.values())


def bases_of(kinds: Iterable[type]) -> list[type]:
    """These classes and their bases, each once, without torch's Module, which `all_modules` looks at."""
    return list(dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in (torch.nn.Module, object)))


def class_code(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """Every function that is written in these classes or in their bases; of torch's own classes only their forwards."""
    for base in bases_of(kinds):
        is_native = package_of(base.__module__) in NATIVE
        for name, value in list(vars(base).items()):
            if not is_native or "forward" in name:
                yield from functions_in(value)


def string_constants(kinds: Iterable[type]) -> set[str]:
    """Every string that is written in the code of these classes: the keys that they can look up, for example."""
    return set().union(*(strings_in(function.__code__) for function in class_code(kinds)))


def strings_in(code: CodeType) -> set[str]:
    """Every string constant of a code object and of those in it."""
    found = {constant for constant in code.co_consts if isinstance(constant, str)}
    return found.union(*(strings_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def names_in(code: CodeType) -> Iterator[str]:
    """Every name of a global or an attribute in a code object and in those in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


class _Step(NamedTuple):
    """One instruction. argval: see `dis`. effect: by how many values the stack grows."""

    name: str
    argval: object
    effect: int


@functools.lru_cache(maxsize=10_000)
def changes(code: CodeType, name: str) -> bool:
    """Code, or code in it, assigns to the global `name`, or changes the container of this name, as with a cache."""
    steps = [step for each in dis.get_instructions(code) for step in _steps_of(each)]
    for number, step in enumerate(steps):
        if step.argval != name:
            continue
        if step.name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return True
        if step.name.startswith("LOAD_") and _is_changed(steps[number + 1 : number + 1 + _MOST_STEPS]):
            return True
    return any(changes(constant, name) for constant in code.co_consts if isinstance(constant, CodeType))


def _steps_of(instruction: dis.Instruction) -> list[_Step]:
    """Python 3.13 loads and stores two variables at once, whose names are a tuple then."""
    if instruction.opname in _NO_STEP:
        return []
    names = instruction.argval
    if isinstance(names, tuple) and "FAST" in instruction.opname:
        kinds = [part for part in instruction.opname.split("_") if part in ("LOAD", "STORE")]
        return [
            _Step(f"{kind}_FAST", each, 1 if kind == "LOAD" else -1) for kind, each in zip(kinds, names, strict=True)
        ]
    effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return [_Step(instruction.opname, names, effect)]


def _is_changed(steps: list[_Step]) -> bool:
    """The value that was loaded just before these steps gets an item, or a method that changes it is called."""
    if steps and steps[0].name in ("LOAD_ATTR", "LOAD_METHOD") and steps[0].argval in _CHANGING:
        return True
    above = 0  # values on the stack above it
    is_read_first = False  # `container[key] += value` puts container and key on the stack once more
    for step in steps:
        if step.name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            return above == (2 if is_read_first else 1)
        is_read_first |= above == 1 and step.name in ("COPY", "DUP_TOP_TWO")
        above += step.effect
        if above < 1:
            return False
    return False


def changed_defaults(functions: Collection[FunctionType]) -> frozenset[str]:
    """Names of arguments whose default is a container that these functions change: what it holds they made themselves.

    Core's blocks have `transformer_options={}`, and write the number of the block into it.
    """
    names = {name for function in functions for name, value in defaults_of(function) if isinstance(value, CONTAINERS)}
    return frozenset(name for name in names if any(changes(function.__code__, name) for function in functions))


@functools.lru_cache(maxsize=10_000)
def attributes_assigned(code: CodeType) -> frozenset[str]:
    """Names of attributes that a code object assigns to or deletes."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_ATTR", "DELETE_ATTR")}
    return frozenset(own).union(*(attributes_assigned(each) for each in code.co_consts if isinstance(each, CodeType)))
