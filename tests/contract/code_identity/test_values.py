"""A value is described whole, or is unknown: other values never have an equal description."""

from __future__ import annotations

import argparse
import collections
import enum
import fractions
import functools
import itertools
import pathlib
import random
import re
import struct
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from compile_cache.code_identity.content import described

Pair = collections.namedtuple("Pair", "a b")


class Real(float):
    pass


class Number(int):
    pass


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> Any:
        return self.held


class Raising:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


class Closed(torch.nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def closing(held: Any) -> Any:
    return lambda x: x * held


def reading(module: Any) -> Any:
    return lambda x: x * module.held


def local_class(held: Any) -> type:
    class Local:
        scale = held

    return Local


def dispatching(held: Any) -> Any:
    function = functools.singledispatch(closing(1))
    function.register(int)(closing(held))
    return function


def mode(held: float) -> enum.Enum:
    return enum.Enum("Mode", {"A": held})["A"]  # type: ignore[misc]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda v: v,
    "an element of a list": lambda v: [v],
    "an element of a tuple": lambda v: (v, None),
    "an element of a named tuple": lambda v: Pair(1, v),
    "an element of a deque": lambda v: collections.deque([v]),
    "a value of a dictionary": lambda v: {"a": v},
    "a value of an ordered dictionary": lambda v: collections.OrderedDict(a=v),
    "a value of a dictionary with a default": lambda v: collections.defaultdict(int, a=v),
    "in a namespace": lambda v: types.SimpleNamespace(a=v),
    "a start option": lambda v: argparse.Namespace(a=v),
    "in a slot": Slots,
    "in an object": Holder,
    "what a method is bound to": lambda v: Holder(v).method,
    "what a method of C is bound to": lambda v: {1: v}.get,
    "closed over": closing,
    "in an object that is closed over": lambda v: closing(Holder(v)),
    "in a module that is closed over": lambda v: reading(Closed(v)),
    "in one of the functions by type": dispatching,
    "an argument of a partial": lambda v: functools.partial(torch.nn.functional.layer_norm, eps=v),
    "a default by name": lambda v: lambda x, *, y=v: y,
    "in a class that a function makes": local_class,
}
LEAVES = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.booleans(), st.none(), st.binary(max_size=3),
    st.floats(allow_nan=False).map(np.float64), st.floats(width=32, allow_nan=False).map(np.float32),
    st.integers(-9, 9).map(np.int16), st.floats(allow_nan=False).map(Real), st.integers().map(Number),
    st.fractions(), st.integers(0, 9).map(range), st.sampled_from([torch.float16, torch.channels_last, torch.strided]),
    st.lists(st.integers(0, 9), max_size=3).map(np.array), st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.sampled_from([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]), st.binary(max_size=3).map(bytearray),
    st.frozensets(st.text(max_size=2), max_size=3),
)  # fmt: skip


def exact(value: Any) -> Any:
    """Equal for values that no code can tell apart."""
    kind = type(value)
    if isinstance(value, float):
        return kind, struct.pack("d", float(value))
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, tuple(value.shape), value.numpy().tobytes()
    return kind, bytes(value) if kind is bytearray else value


@given(LEAVES, LEAVES, st.lists(st.sampled_from(list(WRAPS)), max_size=3))
def test_values_are_described_alike_if_and_only_if_they_are_equal(one: Any, other: Any, wraps: list[str]) -> None:
    unknown: list[str] = []
    made = [
        repr(described(functools.reduce(lambda held, name: WRAPS[name](held), wraps, leaf), unknown))
        for leaf in (one, other, one)
    ]
    assert unknown == []
    assert made[0] == made[2]
    assert (made[0] == made[1]) == (exact(one) == exact(other))


@pytest.mark.parametrize("name", WRAPS)
def test_each_place_shows_what_is_in_it(name: str) -> None:
    values = [
        0.5,
        0.8,
        np.float64(0.5),
        torch.tensor(0.5),
        fractions.Fraction(1, 2),
        re.compile("a"),
        pathlib.Path("a"),
    ]
    found = [repr(described(WRAPS[name](each))) for each in values]
    assert len(set(found)) == len(values)


def test_a_member_of_an_enumeration_counts_by_its_value() -> None:
    assert described(mode(0.5)) == described(mode(0.5))
    assert described(mode(0.5)) != described(mode(0.8))


@pytest.mark.parametrize(
    "value",
    [iter([1]), (x for x in ()), random.Random(1), torch.Generator(), np.random.default_rng(1), memoryview(b"1"),
     itertools.count(), 10**5000, torch.zeros(2).to_sparse()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_nothing_describes_is_unknown_wherever_it_is(value: Any) -> None:
    for wrap in (WRAPS["itself"], WRAPS["an element of a list"], WRAPS["closed over"], WRAPS["in an object"]):
        unknown: list[str] = []
        described(wrap(value), unknown)
        assert unknown in ([type(value).__name__], ["list"])


def test_the_order_of_a_dictionary_counts() -> None:
    assert described({1: 2, 3: 4}) != described({3: 4, 1: 2})


@pytest.mark.parametrize("make", [lambda: torch._neg_view(torch.ones(2)), lambda: torch.tensor([1 + 1j]).conj()])
def test_a_tensor_counts_by_what_it_reads_as(make: Callable[[], torch.Tensor]) -> None:
    assert described(make()) == described(make().clone())
    assert described(make()) != described(make() + 1)


def test_no_code_of_a_value_gets_an_error_out_and_no_cycle_an_end() -> None:
    held: list[Any] = [Raising()]
    held.append(held)
    assert described(held) == described(held)
    assert described(types.FunctionType)
