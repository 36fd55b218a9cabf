"""Code that another pack exchanges is seen by its content, whatever name, module, file or globals it has."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from compile_cache.code_identity.authors import author_of, foreign_on_every_module, is_written_by, is_written_for
from compile_cache.code_identity.reach import CodeReach, ReachCache, exchanged

_NUMBERS = itertools.count()

BLOCKS = """
import functools
from dataclasses import dataclass
import torch

SCALE = 2.0
SIZES = [1, 2, 3]
_CACHE = {}

@dataclass
class Params:
    width: int = 4
    depth: int = 2

@functools.lru_cache(maxsize=4)
def table(width):
    return width + 1

def noted(x, options={"calls": 0}):
    options["calls"] += 1
    return x

def helper(x, offsets={"x": 0}):
    if x.shape not in _CACHE:
        _CACHE[x.shape] = x.mean()
    return noted(x) * SCALE + _CACHE[x.shape] + SIZES[0] + table(2) + offsets["x"]

def in_table(x):
    return of_table(x)

def of_table(x):
    return x

def of_nested(x):
    return x

def of_object(x):
    return x

def unreached(x):
    return x

class Outer:
    class Inner:
        def run(self, x):
            return of_nested(x)

class Actor:
    def act(self, x):
        return of_object(x)

WAYS = {"plain": [in_table]}
ACTOR = Actor()

class Block(torch.nn.Module):
    gain = 1.5
    kinds = ["a", "b"]

    def __init__(self):
        super().__init__()
        self.params = Params()

    @torch.no_grad()
    def forward(self, x):
        return self.attend(helper(x)) * self.gain + len(self.kinds)

    def attend(self, x):
        return x + 1

    def ways(self, x):
        return ACTOR.act(Outer.Inner().run(WAYS["plain"][0](x)))

    @property
    def width(self):
        return self.params.width

    @staticmethod
    def fixed(x):
        return x

class Other(torch.nn.Module):
    def forward(self, x):
        return x
"""
FOREIGN = """
from functools import wraps

def attend(self, x):
    return x * 3

class Scales:
    def __call__(self, x):
        return x * 3

def wrapping(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args) * 2
    return wrapper
"""


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of a model, written long before this process began."""
    monkeypatch.syspath_prepend(str(tmp_path))
    number = next(_NUMBERS)
    names = [f"exchanged_blocks_{number}", f"exchanged_foreign_{number}"]
    for name, source in zip(names, (BLOCKS, FOREIGN), strict=True):
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        os.utime(file, (1e9, 1e9))
    module = importlib.import_module(names[0])
    module.foreign = importlib.import_module(names[1])  # type: ignore[attr-defined]
    yield module
    for name in names:
        del sys.modules[name]


def of_block(blocks: Any) -> CodeReach:
    return ReachCache().of([blocks.Block])


def from_changed_source(blocks: Any, old: str, new: str, name: str) -> Any:
    """`name` of the source with a change in it, run in the module and under the name of its file."""
    assert old in BLOCKS
    held = dict(vars(blocks))
    code = compile(BLOCKS.replace(old, new), blocks.__file__, "exec")
    exec(code, vars(blocks))  # noqa: S102
    made = vars(blocks)[name]
    for each, value in held.items():
        setattr(blocks, each, value)
    return made


def assigned(function: FunctionType, other: FunctionType) -> None:
    function.__code__ = other.__code__


def by_type(function: Any, other: Any) -> Any:
    """A function that chooses another one by the type of what it gets."""
    made = functools.singledispatch(function)
    made.register(int)(other)
    return made


FOREIGN_EXCHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a method": (lambda b: setattr(b.Block, "attend", b.foreign.attend), "Block.attend"),
    "a method with the name of the old one": (
        lambda b: setattr(b.Block, "attend", b.foreign.wrapping(b.Block.attend)),
        "Block.attend",
    ),
    "a method inside torch's decorator": (
        lambda b: setattr(b.Block, "attend", torch.no_grad()(b.foreign.attend)),
        "Block.attend",
    ),
    "a static method": (lambda b: setattr(b.Block, "fixed", staticmethod(b.foreign.attend)), "Block.fixed"),
    "a property": (lambda b: setattr(b.Block, "width", property(lambda self: 5)), "Block.width"),
    "a method that was added": (lambda b: setattr(b.Block, "__call__", b.foreign.attend), "Block.__call__"),
    "the code of a method": (lambda b: assigned(b.Block.attend, b.foreign.attend), "Block.attend"),
    "the code of a function": (lambda b: assigned(b.helper, b.foreign.wrapping), "helper"),
    "changed source of a method": (
        lambda b: setattr(b.Block, "attend", from_changed_source(b, "x + 1", "x + 2", "Block").attend),
        "Block.attend",
    ),
    "changed source of a function": (
        lambda b: setattr(b, "helper", from_changed_source(b, "noted(x) * SCALE", "noted(x) / SCALE", "helper")),
        "helper",
    ),
    "a function with core's globals": (
        lambda b: setattr(b, "helper", FunctionType(b.foreign.attend.__code__, vars(b), "helper")),
        "helper",
    ),
    "a function behind one in a table": (lambda b: setattr(b, "of_table", b.foreign.attend), "of_table"),
    "a function behind a nested class": (lambda b: setattr(b, "of_nested", b.foreign.attend), "of_nested"),
    "a function behind an object": (lambda b: setattr(b, "of_object", b.foreign.attend), "of_object"),
    "a partial in the place of a function": (
        lambda b: setattr(b, "helper", functools.partial(b.foreign.attend)),
        "helper",
    ),
    "a function among those of a type": (
        lambda b: setattr(b, "helper", by_type(b.helper, b.foreign.attend)),
        "helper",
    ),
    "an object in a decorator of torch": (
        lambda b: setattr(b.Block, "attend", torch.no_grad()(by_type(b.Block.attend, b.foreign.Scales()))),
        "Block.attend",
    ),
    "a function inside a cache": (
        lambda b: setattr(b, "table", functools.lru_cache(b.foreign.wrapping)),
        "table",
    ),
}


def test_a_function_that_the_code_cannot_reach_by_name_does_not_count(blocks: Any) -> None:
    before = of_block(blocks)
    digest = before.digest
    blocks.unreached = blocks.foreign.attend
    after = of_block(blocks)
    assert (before.change(), after.foreign, after.digest) == ("", (), digest)


@pytest.mark.parametrize("name", FOREIGN_EXCHANGES)
def test_it_is_foreign_and_other_code(blocks: Any, name: str) -> None:
    exchange, where = FOREIGN_EXCHANGES[name]
    before = of_block(blocks)
    assert (before.foreign, before.change()) == ((), "")
    exchange(blocks)
    assert before.change()
    after = of_block(blocks)
    assert [each.partition(".")[2] for each in after.foreign] == [where]
    assert after.digest != before.digest


DATA_EXCHANGES: dict[str, Callable[[Any], None]] = {
    "a number of the module": lambda b: setattr(b, "SCALE", 3.0),
    "a list of the module": lambda b: setattr(b, "SIZES", [2]),
    "an item of a list": lambda b: b.SIZES.append(4),
    "a function of its own among those of a type": lambda b: setattr(b, "helper", by_type(b.helper, b.in_table)),
    "an object of its own in a closure": lambda b: setattr(b, "helper", by_type(b.helper, b.ACTOR)),
    "an attribute of the class": lambda b: setattr(b.Block, "gain", 1.0),
    "a list of the class": lambda b: b.Block.kinds.append("c"),
    "the defaults of a function": lambda b: setattr(b.helper, "__defaults__", (1,)),
    "a dictionary that is a default": lambda b: setattr(b.helper, "__defaults__", ({"x": 1},)),
}


@pytest.mark.parametrize("name", DATA_EXCHANGES)
def test_data_that_the_code_reads_is_no_foreign_code_but_counts(blocks: Any, name: str) -> None:
    before = of_block(blocks)
    DATA_EXCHANGES[name](blocks)
    assert before.change()
    after = of_block(blocks)
    assert after.foreign == ()
    assert after.digest != before.digest


def test_data_that_the_code_does_not_read_or_writes_itself_does_not_count(blocks: Any) -> None:
    before = of_block(blocks)
    blocks.Block()(torch.zeros(3))
    assert blocks._CACHE
    assert blocks.noted.__defaults__[0]["calls"] == 1
    blocks.UNUSED = 1
    copy.deepcopy(blocks.Params())  # adds `__slotnames__` to the class
    assert not before.change()
    assert of_block(blocks).digest == before.digest
    assert ReachCache().of([blocks.Other]).digest == ReachCache().of([blocks.Other]).digest


def test_put_back_it_is_what_it_was(blocks: Any) -> None:
    reaches, own = ReachCache(), blocks.Block.attend
    before = reaches.of([blocks.Block]).digest
    blocks.Block.attend = blocks.foreign.attend
    assert reaches.of([blocks.Block]).digest != before
    blocks.Block.attend = own
    assert (reaches.of([blocks.Block]).digest, reaches.of([blocks.Block]).foreign) == (before, ())


def test_generated_methods_and_decorators_of_torch_are_the_classs_own(blocks: Any) -> None:
    assert exchanged([blocks.Params, blocks.Block]) == []


def test_a_module_that_was_stable_addresses_from_its_file_is_its_own_and_another_one(blocks: Any) -> None:
    """As a pack does while it is developed. A class that a person trusts has another key then."""
    before, foreign = of_block(blocks).digest, blocks.foreign
    file = Path(blocks.__file__)
    file.write_text(BLOCKS.replace("x + 1", "x + 2"))
    importlib.reload(blocks)
    blocks.foreign = foreign
    after = of_block(blocks)
    assert after.foreign == ()
    assert after.digest != before


def test_a_name_is_not_believed(blocks: Any) -> None:
    own, theirs = blocks.helper, blocks.foreign.attend
    assert author_of(own) == blocks.__name__
    named = functools.wraps(own)(FunctionType(theirs.__code__, vars(blocks)))
    assert named.__module__ == blocks.__name__
    assert author_of(named) == ""
    assert is_written_by(own, blocks.__name__)
    assert not is_written_by(named, blocks.__name__)
    wrapper = blocks.foreign.wrapping(own)
    assert wrapper.__module__ == blocks.__name__
    assert not is_written_by(wrapper, blocks.__name__)
    assert not is_written_for(wrapper, blocks.Block)


def test_what_torch_wraps_around_a_function_is_torchs_under_the_name_of_a_context_too(blocks: Any) -> None:
    wrapped = torch.no_grad()(blocks.helper)
    name = {"co_name": "no_grad"}
    wrapped.__code__ = wrapped.__code__.replace(**name)  # as torch 2.15 does
    assert author_of(wrapped) == "torch.utils._contextlib"
    blocks.helper.__code__ = blocks.helper.__code__.replace(**name)
    assert author_of(blocks.helper) == ""


class TestEveryModule:
    def test_nothing_is_foreign_at_first(self) -> None:
        assert foreign_on_every_module() == ""

    @pytest.mark.parametrize("when", ["forward", "forward_pre"])
    def test_a_hook_on_all_modules_is(self, when: str) -> None:
        handle = getattr(torch.nn.modules.module, f"register_module_{when}_hook")(lambda *_: None)
        assert "hook" in foreign_on_every_module()
        handle.remove()
        assert foreign_on_every_module() == ""

    @pytest.mark.parametrize("name", ["__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"])
    def test_another_way_to_call_a_module_is(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        own = vars(torch.nn.Module)[name]
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, name, functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs)))
            assert name in foreign_on_every_module()
        assert foreign_on_every_module() == ""

    def test_other_code_in_the_same_function_is(self) -> None:
        function: Any = torch.nn.Module._call_impl
        before = function.__code__
        function.__code__ = before.replace(co_consts=(*before.co_consts, "another"))
        try:
            assert "_call_impl" in foreign_on_every_module()
        finally:
            function.__code__ = before
        assert foreign_on_every_module() == ""
