"""Digests of code by its content: what it computes, not where it was written.

A digest has the bytecode, the constants, the names and the defaults of a function, and the functions that it closes
over. It has no file name, no line number, and nothing whose order depends on the seed of Python's hashes. So it is the
same in every process that runs the same code on the same Python.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection, Iterable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from ..keys import repr_digest

_PLAIN = (type(None), bool, int, str, bytes, type(Ellipsis))
CONTAINERS = (dict, list, set)
_DEEPEST = 6  # levels of containers; what is deeper counts by its type alone
_MOST_CODES = 50_000
_CHARS = 32  # hexadecimal digits of a digest
_MOST_VALUES = 1024  # of a tensor whose values count
LruCache = type(functools.lru_cache(lambda: None))

# Code objects that were digested, by address. They are kept, so that an address stays that of one code object.
_digests: dict[int, tuple[CodeType, str]] = {}


def code_digest(code: CodeType) -> str:
    """The digest of a code object and of those in it."""
    known = _digests.get(id(code))
    if known is not None:
        return known[1]
    if len(_digests) >= _MOST_CODES:
        _digests.clear()
    parts = (
        code.co_code,
        getattr(code, "co_exceptiontable", b""),  # since Python 3.11
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        [_constant(constant) for constant in code.co_consts],
    )
    found = repr_digest(parts)[:_CHARS]
    _digests[id(code)] = (code, found)
    return found


def value_digest(value: Any, changed_defaults: Collection[str] = ()) -> str:
    """The digest of a function with its defaults and its closure, or of data. What is neither counts by its class.

    changed_defaults: names of arguments whose default is a container that the code changes. It counts by its class.
    """
    return repr_digest(_value(value, {}, 0, changed_defaults))[:_CHARS]


def defaults_of(function: FunctionType) -> list[tuple[str, Any]]:
    """The arguments of a function that have a default, with it, in their order."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *sorted((function.__kwdefaults__ or {}).items())]


def name_of_class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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


def _value(value: Any, seen: dict[int, int], depth: int, changed_defaults: Collection[str]) -> object:
    """A value as plain data. seen: numbers of the functions and containers around it, by address."""
    if isinstance(value, enum.Enum):
        return (name_of_class(type(value)), value.name)
    if isinstance(value, (*_PLAIN, float, complex)):
        return (type(value).__name__, repr(value))
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, type):
        return ("class", name_of_class(value))
    if isinstance(value, BuiltinFunctionType):
        return ("builtin", value.__module__, value.__qualname__)
    if id(value) in seen:
        return ("again", seen[id(value)])
    if depth > _DEEPEST:
        return ("deep", name_of_class(type(value)))
    return _compound(value, {**seen, id(value): len(seen)}, depth + 1, changed_defaults)


def _compound(value: Any, seen: dict[int, int], depth: int, changed_defaults: Collection[str]) -> object:
    def of(item: Any) -> object:
        return _value(item, seen, depth, changed_defaults)

    def default(name: str, item: Any) -> object:
        return (name, type(item).__name__ if name in changed_defaults and isinstance(item, CONTAINERS) else of(item))

    kind = type(value).__name__
    if isinstance(value, FunctionType):
        contents = [of(each) for each in map(_contents, value.__closure__ or ())]
        defaults = [default(*each) for each in defaults_of(value)]
        return ("function", code_digest(value.__code__), defaults, contents)
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return (kind, of(value.__func__))
    if isinstance(value, LruCache):
        return (kind, of(value.__wrapped__))
    if isinstance(value, functools.partial):
        return (kind, of(value.func), of(value.args), of(value.keywords))
    if isinstance(value, property):
        return (kind, of(value.fget), of(value.fset))
    if isinstance(value, (tuple, list)):
        return (kind, [of(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (kind, _sorted(of(item) for item in value))
    if isinstance(value, dict):
        return (kind, _sorted((of(key), of(item)) for key, item in value.items()))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    named = name_of_class(type(value))
    if dataclasses.is_dataclass(value):
        fields = [(each.name, of(getattr(value, each.name, None))) for each in dataclasses.fields(value)]
        return ("dataclass", named, fields)
    return ("object", named)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _tensor(tensor: torch.Tensor) -> object:
    """A tensor by its shape and dtype; by its values too where they are few and on the host."""
    described = ("tensor", tuple(tensor.shape), str(tensor.dtype), str(tensor.device))
    if tensor.device.type != "cpu" or tensor.numel() > _MOST_VALUES or type(tensor) is not torch.Tensor:
        return described
    return (*described, repr(tensor.detach().tolist()))
