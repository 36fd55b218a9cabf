"""A change inside a model, without another object in its place, is seen: by the next call of a run, by the next run,
and by the key that the next process makes.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_cache.code_identity.authors import foreign_on_every_module
from compile_cache.code_identity.reach import ReachCache
from compile_cache.modules.structure import structure_digest

_NUMBERS = itertools.count()

SOURCE = """
import argparse
import functools
import types
import torch

OPTIONS = argparse.Namespace(strength=1.0, port=8188)
SIZES, SCALES, WAYS, _CACHE, _SEEN = [1, 2], {"a": 1.0}, {"plain": [abs]}, {}, []

class Inner:
    def __init__(self):
        self.bias = 0.5

class Settings:
    offset = 0.0

    def __init__(self, gain=2.0):
        self.gain, self.inner, self.sizes, self.calls, self.seen = gain, Inner(), [1], 0, []

    def __call__(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return x * self.gain + self.inner.bias + self.sizes[0] + self.offset

def adding(amount):
    def add(x):
        return x + amount[0]
    amount = [amount]
    return add

def rebinding(amount):
    def add(x):
        return x + amount
    def rebind(other):
        nonlocal amount
        amount = other
    return add, rebind

def counting():
    calls, shapes = 0, []
    def count(x):
        nonlocal calls
        calls += 1
        shapes.append(x.shape)
        return x
    return count

def scaled(x, scale=1.0, *, shift=0.0, options={}):
    options["calls"] = options.get("calls", 0) + 1
    return x * scale + shift

def decorated(function):
    @functools.wraps(function)
    def around(x):
        return function(x)
    return around

@decorated
def hidden(x):
    return x + 1

@functools.lru_cache(maxsize=4)
def table(width):
    return width

@functools.singledispatch
def dispatched(value):
    return 0.0

@dispatched.register
def _(value: int):
    return 1.0

added = adding(1.0)
bound, rebind = rebinding(1.0)
counted = counting()

def cached(x):
    if x.shape not in _CACHE:
        _CACHE[x.shape] = x.sum()
    _SEEN.append(1)
    return counted(x)

class Linear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class Block(torch.nn.Module):
    kinds = ["a"]

    def __init__(self):
        super().__init__()
        self.first, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)
        self.settings, self.own, self.table, self.memory = Settings(), adding(2.0), {"a": [1.0]}, {}
        self.bound, self.rebind = rebinding(2.0)
        self.method = self.settings.__call__
        self.ways, self.space = [[self.own]], types.SimpleNamespace(first=1.0)

    def forward(self, x):
        self.memory[x.shape] = x.sum()
        x = self.settings(self.drop(self.first(x))) + self.own(x) + self.table["a"][0] + self.bound(x) + self.method(x)
        x = cached(bound(added(hidden(scaled(x))))) + SIZES[0] + SCALES["a"] + len(self.kinds)
        x = x + dispatched(len(x)) * OPTIONS.strength
        return WAYS["plain"][0](self.ways[0][0](x)) + table(4) + self.space.first

class Other(Block):
    def forward(self, x):
        return super().forward(x) + 1
"""


class Case:
    """A model of a package of its own, with what watches it."""

    def __init__(self, code: Any, epochs: ModuleType) -> None:
        self.code = code
        self.block = code.Block()
        self.model = torch.nn.Sequential(self.block, code.Block())
        self.weights = epochs.ModuleState(self.model)
        self.weights.refresh(inspect_modules=True)

    def key(self) -> tuple[str, str]:
        reach = ReachCache().of({*map(type, self.model.modules())})
        return structure_digest(self.block), reach.digest


@pytest.fixture
def case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Callable[[str], ModuleType], comfy: None
) -> Iterator[Case]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(adapter("module_state.module_state"), "is_trusted", lambda kind: True)
    name = f"mutated_{next(_NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    os.utime(tmp_path / f"{name}.py", (1e9, 1e9))  # written before this process began
    yield Case(importlib.import_module(name), adapter("module_state.module_state"))
    del sys.modules[name]


def _other(x: Any, scale: Any = 1.0, *, shift: Any = 0.0, options: Any = None) -> Any:
    return x - scale


def _other_of_hidden(x: Any) -> Any:
    return x - 1


MUTATIONS: dict[str, Callable[[Case], object]] = {
    "the class of a block": lambda c: setattr(c.block, "__class__", c.code.Other),
    "the class of a Linear": lambda c: setattr(c.block.first, "__class__", c.code.Linear),
    "the mode of a model": lambda c: c.model.eval(),
    "the mode of a part": lambda c: c.block.drop.eval(),
    "a list of the module": lambda c: c.code.SIZES.__setitem__(0, 5),
    "a dictionary of the module": lambda c: c.code.SCALES.update(a=2.0),
    "a list in a dictionary of the module": lambda c: c.code.WAYS["plain"].__setitem__(0, torch.neg),
    "an option of a namespace of the module": lambda c: setattr(c.code.OPTIONS, "strength", 2.0),
    "an attribute of a namespace on a block": lambda c: setattr(c.block.space, "first", 2.0),
    "a list of the class": lambda c: c.code.Block.kinds.append("b"),
    "the code of a function": lambda c: setattr(c.code.scaled, "__code__", _other.__code__),
    "the code of a decorated function": lambda c: setattr(
        c.code.hidden.__wrapped__, "__code__", _other_of_hidden.__code__
    ),
    "the code of a cached function": lambda c: setattr(c.code.table.__wrapped__, "__code__", _other_of_hidden.__code__),
    "the code of a method": lambda c: setattr(c.code.Block.forward, "__code__", _other.__code__),
    "the code of an object's method": lambda c: setattr(c.code.Settings.__call__, "__code__", _other.__code__),
    "the defaults of a function": lambda c: setattr(c.code.scaled, "__defaults__", (3.0,)),
    "the named defaults of a function": lambda c: setattr(
        c.code.scaled, "__kwdefaults__", {**c.code.scaled.__kwdefaults__, "shift": 3.0}
    ),
    "a named default of a function": lambda c: c.code.scaled.__kwdefaults__.update(shift=3.0),
    "a variable around a function of the module": lambda c: c.code.rebind(3.0),
    "a list around a function of the module": lambda c: c.code.added.__closure__[0].cell_contents.__setitem__(0, 3.0),
    "a variable around a function of a block": lambda c: c.block.rebind(3.0),
    "a list around a function of a block": lambda c: c.block.own.__closure__[0].cell_contents.__setitem__(0, 3.0),
    "the registry of a dispatched function": lambda c: c.code.dispatched.register(int, lambda value: 2.0),
    "another list around a function of a block": lambda c: setattr(c.block.own.__closure__[0], "cell_contents", [3.0]),
    "an attribute of an object on a block": lambda c: setattr(c.block.settings, "gain", 3.0),
    "an attribute of an object in one": lambda c: setattr(c.block.settings.inner, "bias", 3.0),
    "a list of an object on a block": lambda c: c.block.settings.sizes.__setitem__(0, 3),
    "an attribute that hides one of its class": lambda c: setattr(c.block.settings, "offset", 3.0),
    "the class of an object on a block": lambda c: setattr(c.block.settings, "__class__", c.code.Inner),
    "a method of another object": lambda c: setattr(c.block, "method", c.code.Settings(3.0).__call__),
    "a list in a dictionary of a block": lambda c: c.block.table["a"].__setitem__(0, 3.0),
    "a list in a list of a block": lambda c: c.block.ways[0].__setitem__(0, torch.neg),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_seen_by_the_next_call_the_next_run_and_the_next_process(case: Case, name: str) -> None:
    key, epoch = case.key(), case.weights.epoch
    assert case.weights.change() == ""
    MUTATIONS[name](case)
    assert case.weights.change() != ""
    case.weights.refresh(inspect_modules=True)
    assert case.weights.epoch > epoch
    assert case.weights.change() == "", "the next run computes as the model is now"
    assert case.key() != key


def test_what_the_code_writes_itself_is_no_change(case: Case) -> None:
    epoch = case.weights.epoch
    for batch in (1, 2, 3):
        case.model(torch.zeros(batch, 4))
        assert case.weights.change() == ""
    assert len(case.code._CACHE) == len(case.block.memory) == 3
    assert case.block.settings.calls == 6
    assert case.code.scaled.__kwdefaults__["options"]["calls"] == 6
    for part in case.model:  # what it keeps on its blocks counts from one run to the next
        part.memory.clear()
        part.settings.seen.clear()
        part.settings.calls = 0
    case.weights.refresh(inspect_modules=True)
    assert case.weights.epoch == epoch


SAME: dict[str, Callable[[Case], object]] = {
    "an option that the code does not read": lambda c: setattr(c.code.OPTIONS, "port", 1),
    "a list": lambda c: setattr(c.block, "ways", [[c.block.own]]),
    "a method": lambda c: setattr(c.block, "method", c.block.settings.__call__),
    "a number": lambda c: setattr(c.block.settings, "gain", float("2.0")),
    "a function": lambda c: setattr(c.block, "own", c.code.adding(2.0)),
}


@pytest.mark.parametrize("name", SAME)
def test_an_equal_one_in_its_place_is_no_change(case: Case, name: str) -> None:
    epoch = case.weights.epoch
    SAME[name](case)
    assert case.weights.change() == ""
    case.weights.refresh(inspect_modules=True)
    assert case.weights.epoch == epoch


def test_a_change_that_is_undone_is_none(case: Case) -> None:
    case.code.SIZES.append(3)
    assert case.weights.change().endswith(".SIZES")
    case.code.SIZES.pop()
    assert case.weights.change() == ""


def test_an_object_at_the_address_of_one_that_is_gone_is_another(case: Case) -> None:
    for _ in range(50):
        case.block.settings = case.code.Settings()
        case.weights.refresh(inspect_modules=True)
        del case.block.settings
        case.block.settings = case.code.Settings()
        assert case.weights.change() != ""


def test_a_model_with_all_this_goes_when_everybody_else_lets_go(case: Case) -> None:
    case.block.settings.model = [case.model]
    case.block.table["model"] = functools.partial(print, case.model)
    case.weights.refresh(inspect_modules=True)
    assert case.weights.change() == ""
    gone = weakref.ref(case.model)
    del case.model, case.block
    gc.collect()
    assert gone() is None


def test_an_object_around_the_call_of_every_module_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Around:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self)["function"], name)  # its code too

        def __get__(self, module: Any, kind: Any) -> Any:
            return self if module is None else functools.partial(self, module)

        def __call__(self, *args: Any) -> Any:
            return self.function(*args) * 2

    assert foreign_on_every_module() == ""
    monkeypatch.setattr(torch.nn.Module, "_call_impl", Around(torch.nn.Module._call_impl))
    assert "_call_impl" in foreign_on_every_module()
