"""Values of odd kinds, as other packs may give a model or a block: whatever describes one must not end a prompt."""

from __future__ import annotations

import collections
import contextlib
import decimal
import enum
import functools
import itertools
import threading
import types
import weakref
from typing import Any

import numpy as np
import torch

X = torch.ones(2, 5, 16)


def _raise(*_: Any) -> Any:
    raise RuntimeError


def odd(base: type, *names: str) -> Any:
    """A class whose methods with these names raise."""
    return type("Odd", (base,), dict.fromkeys(names, _raise))


class _Endless(collections.abc.Mapping):  # type: ignore[type-arg]
    """A mapping that says it has items and raises when they are read."""

    __getitem__ = __iter__ = _raise

    def __len__(self) -> int:
        return 3


def _cycle() -> list[Any]:
    held: list[Any] = [1]
    held.append(held)
    return held


def _gone() -> Any:
    return weakref.proxy(odd(object)())


ODD: dict[str, Any] = {
    "the class of functions": types.FunctionType,
    "a function": torch.nn.functional.gelu,
    "a lambda": lambda: None,
    "a method of C": [].append,
    "a partial": functools.partial(print, 1),
    "a generator": (each for each in ()),
    "an endless iterator": itertools.count(),
    "a context manager": contextlib.nullcontext(),
    "a lock": threading.Lock(),
    "a module": torch.nn.Linear(2, 2),
    "a Python module": types,
    "a set": {1},
    "a frozen set": frozenset({X.shape}),
    "a range": range(3),
    "bytes": b"a",
    "a number of numpy": np.float64(1.0),
    "an array of numpy": np.ones(3),
    "an array of objects": np.array([None, "a"], dtype=object),
    "a decimal number": decimal.Decimal("1.1"),
    "a complex number": 1j,
    "no number": float("nan"),
    "a member of an enumeration": enum.Enum("Mode", {"A": [1]})["A"],  # type: ignore[misc]
    "an object that cannot be compared": odd(object, "__eq__", "__hash__", "__repr__")(),
    "an object without attributes": odd(object, "__getattribute__")(),
    "an object that is neither true nor false": odd(object, "__bool__", "__len__")(),
    "an object that is gone": _gone(),
    "a text that cannot be compared": odd(str, "__eq__", "__hash__")("a"),
    "a number that cannot be compared": odd(float, "__eq__", "__hash__")(1.0),
    "a number that cannot be written": odd(float, "__repr__")(1.0),
    "a class that knows no attribute": odd(type, "__getattr__")("Made", (), {})(),
    "a mapping that cannot be read": _Endless(),
    "a list without an end": odd(list, "__iter__", "__len__")([1]),
    "a list in itself": _cycle(),
    "a list of a tensor's class": [types.MappingProxyType({})],
    "a dictionary with a number as a key": {1: 2},
    "a large number": 2**63 + 1,
    "a number of many digits": 10**5000,
    "a sparse tensor": X.to_sparse(),
    "a tensor in a class of its own": X.as_subclass(odd(torch.Tensor)),
    "a tensor without a place": torch.empty(3, device="meta"),
}
