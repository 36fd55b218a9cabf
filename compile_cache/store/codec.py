"""Dataclasses as JSON and back: the one codec for the files that Resolute keeps beside compiled code.

Each value is checked when it is read, because a file may be damaged, or from another version. Files are written
atomically, and only regular files of this user are read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from ..keys import Literal
from .private_files import NotPrivateError, make_private, open_own, write_file

T = TypeVar("T")

MAX_BYTES = 16 << 20  # of a file; a real one has a few thousand
_MAX_NESTING = 100  # levels; a real file has fewer than ten, and reading deeper ones may overflow Python's stack
_MAX_WHOLE = (1 << 63) - 1  # largest dimension in torch (int64)
_MAX_FLOAT = 1 << 40  # every stored float is a time or a small difference


class InvalidArtifactError(Exception):
    """A file, or an artifact in it, must not be used; the message says why."""


# --- files -----------------------------------------------------------------------------------------------------


def load(path: Path, kind: Any) -> Any:
    """Read a value of type `kind` from a file. Raises InvalidArtifactError, or OSError if it cannot be read now."""
    return decoded(kind, parse_json(read_regular_file(path)))


def save(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically, into a private folder. Raises OSError."""
    make_private(path.parent)
    write_file(path, json.dumps(plain(value)).encode())


def read_regular_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a file of at most `max_bytes`. Raises InvalidArtifactError, also if `open_own` refuses the file, or OSError
    if it cannot be read.
    """
    try:
        with open_own(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise InvalidArtifactError(f"its {path.suffix[1:]} file has {size} bytes instead of {max_bytes}")
            return stream.read()
    except NotPrivateError as error:
        raise InvalidArtifactError(str(error)) from error


def parse_json(text: bytes) -> Any:
    """Parse JSON. Raises InvalidArtifactError if it is damaged, or nested so deeply that it may exhaust the stack."""
    with contextlib.suppress(ValueError, RecursionError):
        level = [data := json.loads(text)]
        for _ in range(_MAX_NESTING):
            inside = [each.values() if isinstance(each, dict) else each for each in level if type(each) in (dict, list)]
            level = list(chain.from_iterable(inside))
        if not level:
            return data
    raise InvalidArtifactError("its manifest is damaged")


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys: the same bytes for the same data."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# --- values ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value as JSON: dataclasses become objects of their fields, tuples lists, and sets sorted lists."""
    if is_dataclass(value):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value) if part.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(each) for each in value)
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return value


def decoded(kind: Any, data: Any) -> Any:
    """Return the value of type `kind` whose `plain` form is `data`. Raises InvalidArtifactError.

    kind: a dataclass, an enum of texts, str, bool, int (not below zero), float (finite, not below zero), a tuple, a
    frozenset, a mapping by texts, a union of these, or Any for raw JSON. A field with a default may be missing.
    """
    try:
        return _decoded(kind, data)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArtifactError(f"{_short(data)} is no {getattr(kind, '__name__', kind)}: {error}") from error


def _decoded(kind: Any, data: Any) -> Any:
    if kind in _PLAIN:
        return _PLAIN[kind](data)
    if get_origin(kind) in (Union, types.UnionType):
        return _one_of(get_args(kind), data)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), _of_type(list, data))
    if get_origin(kind) is frozenset:
        return frozenset(_decoded(get_args(kind)[0], each) for each in _of_type(list, data))
    if get_origin(kind) in (dict, Mapping):
        return {name: _decoded(get_args(kind)[1], each) for name, each in _of_type(dict, data).items()}
    if is_dataclass(kind):
        return _dataclass(kind, _of_type(dict, data))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_of_type(str, data))
    raise TypeError(f"{kind} has no form on disk")


def _of_type(kind: type[T], data: Any) -> T:
    if type(data) is not kind:
        raise TypeError(f"{_short(data)} is no {kind.__name__}")
    return data


def _whole(data: Any) -> int:
    if not 0 <= _of_type(int, data) <= _MAX_WHOLE:
        raise ValueError(f"{_short(data)} is out of range")
    return cast("int", data)


def _number(data: Any) -> float:
    if type(data) not in (int, float) or not 0 <= data <= _MAX_FLOAT:  # NaN fails the comparison
        raise ValueError(f"{_short(data)} is no time")
    return float(data)


def _literal(data: Any) -> Any:
    """Return any plain value of a key: lists become tuples."""
    if isinstance(data, list):
        return tuple(map(_literal, data))
    if isinstance(data, dict):
        raise TypeError("an object cannot be part of a key")
    return data


def _nothing(data: Any) -> None:
    if data is not None:
        raise TypeError(f"{_short(data)} is not null")


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: _number,
    str: functools.partial(_of_type, str),
    bool: functools.partial(_of_type, bool),
    Any: lambda data: data,
    type(None): _nothing,
}


def _one_of(kinds: tuple[Any, ...], data: Any) -> Any:
    if {str, float} <= set(kinds):  # `keys.Literal`
        return _literal(data)
    for kind in kinds:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return _decoded(kind, data)
    raise TypeError(f"{_short(data)} is none of {kinds}")


def _tuple(kinds: tuple[Any, ...], data: list[Any]) -> tuple[Any, ...]:
    if kinds[1:] == (...,):
        return tuple(_decoded(kinds[0], each) for each in data)
    return tuple(_decoded(kind, each) for kind, each in zip(kinds, data, strict=True))


def _dataclass(kind: Any, data: dict[str, Any]) -> Any:
    parts = {part.name: part for part in fields(kind) if part.init}
    if unknown := data.keys() - parts.keys():
        raise KeyError(f"{kind.__name__} has no {_short(sorted(unknown))}")
    hints = _hints(kind)
    known: dict[str, Any] = {}
    for name, part in parts.items():
        if name in data:
            known[name] = _decoded(hints[name], data[name])
        elif part.default is MISSING and part.default_factory is MISSING:
            raise KeyError(name)
    return kind(**known)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, localns={"Literal": Literal})  # `keys.Literal` refers to itself by name


def _short(data: Any) -> str:
    return f"{data!r:.80}"
