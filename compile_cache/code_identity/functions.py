"""The Python functions behind a value: through methods, properties, partials, caches, and decorators' closures."""

from __future__ import annotations

import dis
import functools
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from .names import NATIVE, package_of

_WITHOUT_FUNCTIONS = frozenset({type, type(None), bool, int, float, str, tuple, list, dict, set, BuiltinFunctionType})
PLAIN = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout,
        torch.memory_format,
    }
)  # fmt: skip
CONTAINERS = frozenset({tuple, list, set, frozenset, dict, torch.Size})
_NO_NAMES = frozenset[str]()
_DEEPEST_NAMES = 4  # levels of containers and classes that are searched for functions and names
LruCache: type = type(functools.lru_cache(lambda: None))
CONSISTS_OF: tuple[tuple[Any, tuple[str, ...]], ...] = (  # wrappers: the class, and the attributes of its parts
    (MethodType, ("__func__", "__self__")),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (functools.partial, ("func", "args", "keywords")),
    (functools.partialmethod, ("func", "args", "keywords")),
    (functools.cached_property, ("func",)),
    (LruCache, ("__wrapped__",)),
    (property, ("fget", "fset", "fdel")),
)
_STANDS_FOR = tuple(base for base, _ in CONSISTS_OF)
_OF_FUNCTIONS = frozenset({"__func__", "func", "__wrapped__", "fget", "fset"})
CUSTOM_OPERATOR = "CustomOpDef"
MODULE_CODE = "<module>"  # the name of a file's top-level code
_STORE_GLOBAL, _STORE_DEREF, _FOR_ITER = (dis.opmap[name] for name in ("STORE_GLOBAL", "STORE_DEREF", "FOR_ITER"))
_WRITES = frozenset(
    {
        dis.opmap["STORE_SUBSCR"], dis.opmap["DELETE_SUBSCR"], "add", "append", "appendleft", "clear", "discard",
        "extend", "insert", "pop", "popitem", "popleft", "remove", "setdefault", "update",
    }
)  # fmt: skip
_ASSIGNS = frozenset({dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]})
_LEAVES_THE_TOP = ("BINARY_SUBSCR", "CACHE", "DELETE", "JUMP", "NOP", "POP", "RESUME", "STORE")  # unchanged
_OF_LOOPS = ("CACHE", "UNPACK_SEQUENCE", "STORE_NAME")


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a value is or wraps; none for a class, a builtin or an object."""
    kind = type(value)  # a proxy's `__class__` may claim that it is a function
    if kind in _WITHOUT_FUNCTIONS:
        return
    if kind is FunctionType:
        yield value
    elif kind.__name__ == CUSTOM_OPERATOR:  # of torch.library
        yield from functions_in(getattr(value, "_init_fn", None))
    elif issubclass(kind, _STANDS_FOR):
        names = next(names for base, names in CONSISTS_OF if issubclass(kind, base))
        for name in names:
            if name in _OF_FUNCTIONS:
                yield from functions_in(getattr(value, name))


def closed_over(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions in a function's closure, such as those that a decorator decorates or chooses from."""
    for contents in held_in(cells_of(function)):
        yield from functions_in(contents)


def held_in(values: Iterable[Any], depth: int = 0) -> list[Any]:
    """Return these values with containers replaced by their elements, without plain data."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in CONTAINERS and depth < _DEEPEST_NAMES:
            found += held_in(list(value.values() if kind is dict else value), depth + 1)
        elif kind not in PLAIN:
            found.append(value)
    return found


def cells_of(function: FunctionType) -> list[Any]:
    """Return the values that a function closes over; None for an empty cell."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # an empty cell
            found.append(None)
    return found


def chain(value: Any) -> list[FunctionType]:
    """Return the functions that a value is or wraps, and all functions that these close over."""
    found: dict[int, FunctionType] = {}
    waiting = list(functions_in(value))
    while waiting:
        function = waiting.pop()
        if id(function) not in found:
            found[id(function)] = function
            waiting += closed_over(function)
    return list(found.values())


def bases_of(kinds: Iterable[type]) -> list[type]:
    """Return these classes and their bases, each once. For torch's Module see `foreign_on_every_module`."""
    return list(dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in (torch.nn.Module, object)))


def class_code(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """Yield every function that these classes or their bases define; of torch's own classes only the forwards."""
    for base in bases_of(kinds):
        is_native = package_of(base.__module__) in NATIVE
        for name, value in list(vars(base).items()):
            if not is_native or "forward" in name:
                yield from functions_in(value)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if constant.__class__ is CodeType:
            yield from codes_in(constant)


def string_constants(kinds: Iterable[type]) -> set[str]:
    """Return every string in the code of these classes, such as the keys that they can look up."""
    return {text for function in class_code(kinds) for text in strings_in(function.__code__)}


def strings_in(code: CodeType) -> Iterator[str]:
    return (constant for each in codes_in(code) for constant in each.co_consts if isinstance(constant, str))


def names_in(codes: Iterable[CodeType]) -> set[str]:
    """Return every name and string in these code objects and in those nested in them."""
    return {name for code in codes for each in codes_in(code) for name in (*each.co_names, *strings_in(each))}


@functools.lru_cache(maxsize=50_000)
def names_used(code: CodeType) -> frozenset[str]:
    """Return the names in a code object and in those nested in it."""
    return frozenset(code.co_names).union(*(names_used(each) for each in code.co_consts if type(each) is CodeType))


def names_behind(value: Any, depth: int = 0) -> frozenset[str]:
    """Return the names in the functions that a value is or wraps, in the functions of a class and its bases or of an
    object's class, and in everything that a container or a class contains.
    """
    kind = type(value)
    if kind in PLAIN or depth > _DEEPEST_NAMES:
        return _NO_NAMES
    if kind in CONTAINERS:
        return _NO_NAMES.union(*(names_behind(each, depth + 1) for each in held_in([value], depth)))
    written = list(functions_in(value))
    inside: list[Any] = []
    if not written:
        of = value if isinstance(value, type) else kind
        is_native = package_of(of.__module__) in NATIVE
        written = [] if is_native and not isinstance(value, type) else list(class_code((of,)))
        bases = [] if is_native else bases_of((of,))
        members = [each for base in bases for each in list(vars(base).values())]
        inside = [each for each in members if type(each) in CONTAINERS or (isinstance(each, type) and each is not of)]
    codes = (each.__code__ for function in written for each in chain(function))
    return _NO_NAMES.union(*map(names_used, codes), *(names_behind(each, depth + 1) for each in inside))


def names_left_behind(codes: Iterable[CodeType]) -> set[str]:
    """Return the names of a module that are no settings: names that its functions assign to (`global x`), and variables
    of its top-level loops, which end with another item of a set in each process. codes: all code of the module.
    """
    found: set[str] = set()
    for code in codes:
        steps = code.co_code[::2]
        if _STORE_GLOBAL in steps or (code.co_name == MODULE_CODE and _FOR_ITER in steps):
            is_looping = False
            for step in dis.get_instructions(code):
                is_looping = step.opname == "FOR_ITER" or (is_looping and step.opname in _OF_LOOPS)
                if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (is_looping and step.opname == "STORE_NAME"):
                    found.add(str(step.argval))
    return found


def names_written_into(codes: Iterable[CodeType]) -> set[str]:
    """Return a module's names whose containers its functions write to, such as caches: `x[key] = ...`, `x.append(...)`.

    A leading dot marks an attribute, or a variable of an enclosing function, which may be assigned too (`nonlocal x`).
    """
    found = set[str]()
    for code in codes:
        steps = code.co_code[::2]
        if code.co_name != MODULE_CODE and (_STORE_DEREF in steps or not _WRITES.isdisjoint((*steps, *code.co_names))):
            found |= _written_into(code)
    return found


@functools.lru_cache(maxsize=10_000)
def _written_into(code: CodeType) -> set[str]:
    found, stack = set[str](), list[str]()  # the stack: for each value the name that loaded it
    for step in dis.get_instructions(code):
        if step.is_jump_target:  # the stack depends on the origin of the jump
            stack.clear()
        change, place = dis.stack_effect(step.opcode, step.arg, jump=False), step.arg or 0
        if step.opcode in _WRITES:
            found.update(stack[-2:-1])
        elif step.argval in _WRITES and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.update(stack[-1:])
        elif step.opcode == _STORE_DEREF:
            found.add(f".{step.argval}")
        if step.opname == "SWAP" and place <= len(stack):
            stack[-1], stack[-place] = stack[-place], stack[-1]
        elif change > 0:
            known = stack[-place:][:1] if step.opname == "COPY" else []
            known = [f".{step.argval}"] if step.opname == "LOAD_DEREF" else known
            stack += [step.argval] if (step.opname, change) == ("LOAD_GLOBAL", 1) else known or [""] * change
        else:
            del stack[max(len(stack) + change, 0) :]
            if stack and not step.opname.startswith(_LEAVES_THE_TOP):
                stack[-1] = f".{step.argval}" if step.opname == "LOAD_ATTR" else ""
    return found - {""}


@functools.lru_cache(maxsize=10_000)
def attributes_assigned(code: CodeType) -> frozenset[str]:
    """Return the names of attributes that a code object assigns or deletes. Reading its bytes is quick."""
    found = set[str]()
    for each in codes_in(code):
        high = 0
        for step, low in zip(each.co_code[::2], each.co_code[1::2], strict=True):
            if step in _ASSIGNS:
                found.add(each.co_names[high | low])
            high = (high | low) << 8 if step == dis.EXTENDED_ARG else 0
    return frozenset(found)


def attributes_read(code: CodeType, variable: str) -> set[str] | None:
    """Return the attributes that a function reads of an enclosing function's variable; None if it has other uses."""
    found = set[str]()
    for each in codes_in(code):
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if step.argval == variable and step.opname.endswith("DEREF"):
                if after is None or (step.opname, after.opname) != ("LOAD_DEREF", "LOAD_ATTR"):
                    return None
                found.add(after.argval)
    return found


def code_of(kinds: Collection[type]) -> Iterator[CodeType]:
    """Yield the code that modules of these classes can run after their construction: their methods, of `__init__` only
    the nested functions, and the functions of the Python modules that define the methods.
    """
    homes: dict[str, dict[str, Any]] = {}
    for function in class_code(kinds):
        home = str(function.__globals__.get("__name__"))
        if package_of(home) not in NATIVE:
            homes[home] = function.__globals__
        code = function.__code__
        yield from [*codes_in(code)][1:] if function.__name__ == "__init__" else [code]
    for held in homes.values():
        yield from [function.__code__ for value in list(held.values()) for function in functions_in(value)]
