"""Code and settings as plain data, by what they are: equal in every process that has the same.

It has the bytecode, the constants, the names and the defaults of a function, and what it closes over. It has no file
name, no line number, and nothing whose order depends on the seed of Python's hashes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from ..keys import repr_digest
from ..torch_facts.private_names import OpOverload
from .functions import LruCache, bases_of, cells_of, chain, class_code, functions_in, names_used
from .names import NATIVE, name_of_class, package_of

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device})
_CONTAINERS = frozenset({tuple, list, set, frozenset, dict, torch.Size})
_MUTABLE = frozenset({list, set, dict})
_LISTS = frozenset({tuple, list, torch.Size})
_NO_NAMES = frozenset[str]()
_NUMBERS = frozenset({bool, int, float, str})
_DEEPEST = 6  # levels of containers; what is deeper counts by its type alone
_DEEPEST_NAMES = 4  # levels of containers and classes in which names are looked for
_MOST_CODES = 50_000
_CHARS = 32  # hexadecimal digits of a digest

# By function: the addresses of its defaults, and what these were when they were first seen.
_seen_defaults: weakref.WeakKeyDictionary[FunctionType, tuple[list[int], list[object]]] = weakref.WeakKeyDictionary()
# Code objects that were digested, by address. They are kept, so that an address stays that of one code object.
_digests: dict[int, tuple[CodeType, str]] = {}


def code_digest(code: CodeType) -> str:
    """The digest of a code object and of those in it."""
    known = _digests.get(id(code))
    if known is not None:
        return known[1]
    if len(_digests) >= _MOST_CODES:
        _digests.clear()
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    raises = getattr(code, "co_exceptiontable", b"")  # since Python 3.11
    digest = repr_digest((code.co_code, raises, arguments, names, list(map(_constant, code.co_consts))))[:_CHARS]
    _digests[id(code)] = (code, digest)
    return digest


def described(value: Any, depth: int = 0) -> object:
    """A value as plain data. A list, set or dictionary that may be a cache, because it holds more than settings, counts
    by its type, and so does an object whose class is known by its name alone.
    """
    kind = type(value)
    if kind in PLAIN:
        return (kind.__name__, value if kind in _NUMBERS else str(value))
    if kind is type or isinstance(value, (type, enum.Enum)):
        return (kind.__name__, name_of_class(value) if isinstance(value, type) else str(value))
    if depth > _DEEPEST:
        return ("deep", name_of_class(kind))
    within = functools.partial(described, depth=depth + 1)
    if kind is FunctionType:
        closed_over = map(within, cells_of(value)) if value.__closure__ else ()
        return ("function", code_digest(value.__code__), _defaults(value, within), list(closed_over))
    if isinstance(value, (BuiltinFunctionType, OpOverload)):
        return ("builtin", str(value.__module__), getattr(value, "__qualname__", str(value)))
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return (kind.__name__, within(value.__func__))
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return (kind.__name__, within(value.func), within(value.args), within(value.keywords))
    if isinstance(value, LruCache):
        return (kind.__name__, within(getattr(value, "__wrapped__", None)))
    if isinstance(value, (property, functools.cached_property)):
        return (kind.__name__, *[within(getattr(value, name, None)) for name in ("fget", "fset", "func")])
    if kind in _CONTAINERS:
        return _container(value, kind, depth + 1)
    if kind is slice:
        return (kind.__name__, *map(within, (value.start, value.stop, value.step)))
    if dataclasses.is_dataclass(kind):
        fields = [(each.name, within(getattr(value, each.name, None))) for each in dataclasses.fields(value)]
        return (name_of_class(kind), fields)
    return ("object", name_of_class(kind))


def names_behind(value: Any, depth: int = 0) -> frozenset[str]:
    """The names in the functions that a value is or wraps, in those of a class and its bases, or of an object's class,
    and in all that a container or a class holds.
    """
    kind = type(value)
    if kind in PLAIN or depth > _DEEPEST_NAMES:
        return _NO_NAMES
    if kind in _CONTAINERS:
        held = () if is_setting(value) else list(value.values() if kind is dict else value)
        return _NO_NAMES.union(*(names_behind(each, depth + 1) for each in held))
    written = list(functions_in(value))
    inside: list[Any] = []
    if not written:
        of = value if isinstance(value, type) else kind
        is_native = package_of(of.__module__) in NATIVE
        written = [] if is_native and not isinstance(value, type) else list(class_code((of,)))
        bases = [] if is_native else bases_of((of,))
        members = [each for base in bases for each in list(vars(base).values())]
        inside = [each for each in members if type(each) in _CONTAINERS or (isinstance(each, type) and each is not of)]
    codes = (each.__code__ for function in written for each in chain(function))
    return _NO_NAMES.union(*map(names_used, codes), *(names_behind(each, depth + 1) for each in inside))


def is_setting(value: Any, depth: int = 0) -> bool:
    """Plain data, or a container of nothing else."""
    kind = type(value)
    if kind in _LISTS and _NUMBERS.issuperset(map(type, value)):
        return True
    if kind in _CONTAINERS and depth <= _DEEPEST:
        items = (*value.keys(), *value.values()) if kind is dict else value
        return all(is_setting(item, depth + 1) for item in items)
    return kind in PLAIN or isinstance(value, enum.Enum)


def _defaults(function: FunctionType, within: Callable[[Any], object]) -> list[object]:
    """The defaults of a function. A list, set or dictionary among them counts as it was when it was first seen: code
    of core's writes into its `transformer_options={}`.
    """
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not any(type(value) in _MUTABLE for value in values):
        return list(map(within, values))
    objects = list(map(id, values))
    known, found = _seen_defaults.get(function, ([], []))
    if known != objects:
        found = list(map(within, values))
        _seen_defaults[function] = (objects, found)
    return found


def _container(value: Any, kind: type, depth: int) -> object:
    if kind in _LISTS and _NUMBERS.issuperset(map(type, value)):  # without a call for each of many numbers
        return (kind.__name__, *value)
    if not issubclass(kind, tuple) and not is_setting(value):
        return (kind.__name__,)
    if kind is dict:
        return (kind.__name__, _sorted((described(key, depth), described(item, depth)) for key, item in value.items()))
    items = [described(item, depth) for item in value]
    return (kind.__name__, _sorted(items) if kind in (set, frozenset) else items)


def _constant(value: Any) -> object:
    if isinstance(value, CodeType):
        return ("code", code_digest(value))
    if isinstance(value, tuple):
        return ("tuple", [_constant(item) for item in value])
    if isinstance(value, frozenset):
        return ("set", _sorted(_constant(item) for item in value))
    return (type(value).__name__, repr(value))


def _sorted(items: Iterable[object]) -> list[str]:
    return sorted(map(repr, items))
