"""What a model's code can reach at module level, and what another pack put there."""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_cache.code_identity.reach import CodeReach, ReachCache

_NUMBERS = itertools.count()

MATH = """
import torch
from functools import wraps
from {kernels} import fast

def decorated(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def helper(x):
    return x + 1

@decorated
def attention(x):
    return torch.nn.functional.softmax(helper(x), -1)

def unused(x):
    return x
"""
BLOCKS = """
import torch
from . import math
from .math import attention

class Block(torch.nn.Module):
    def forward(self, x):
        return attention(x)

class Other(torch.nn.Module):
    def forward(self, x):
        return self.norm(x) + math.helper(x)

    def norm(self, x):
        return (lambda y: y * 2)(x)
"""
KERNELS = "def fast(x):\n    return x\n"
FOREIGN = """
def exchanged(x):
    return x * 3

def wrapping(function):
    from functools import wraps
    @wraps(function)
    def wrapper(*args):
        return function(*args) * 2
    return wrapper
"""


class Packages:
    """A package of blocks, a package of kernels that it imports, and another pack that it does not."""

    def __init__(self, folder: Path) -> None:
        number = next(_NUMBERS)
        self.names = {part: f"reach_{part}_{number}" for part in ("blocks", "kernels", "foreign")}
        package = folder / self.names["blocks"]
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "math.py").write_text(MATH.format(kernels=self.names["kernels"]))
        (package / "model.py").write_text(BLOCKS)
        (package / "beside.py").write_text("def helper(x):\n    return x\n")
        (folder / f"{self.names['kernels']}.py").write_text(KERNELS)
        (folder / f"{self.names['foreign']}.py").write_text(FOREIGN)

    @property
    def math(self) -> Any:
        return importlib.import_module(f"{self.names['blocks']}.math")

    @property
    def beside(self) -> Any:
        return importlib.import_module(f"{self.names['blocks']}.beside")

    @property
    def model(self) -> Any:
        return importlib.import_module(f"{self.names['blocks']}.model")

    @property
    def kernels(self) -> ModuleType:
        return importlib.import_module(self.names["kernels"])

    @property
    def foreign(self) -> Any:
        return importlib.import_module(self.names["foreign"])

    def reach(self, *names: str) -> CodeReach:
        return ReachCache().of([getattr(self.model, name) for name in names or ("Block", "Other")])


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Packages(tmp_path)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in made.names.values()]:
        del sys.modules[name]


def test_torchs_own_attention_exchanged_for_everybody_is_noticed(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = packages.reach("Block")
    monkeypatch.setattr(torch.nn.functional, "softmax", packages.foreign.exchanged)
    assert before.change()
    assert packages.reach("Block").foreign == ("torch.nn.functional.softmax",)


def test_a_package_that_the_source_imports_is_native(packages: Packages) -> None:
    before = packages.reach()
    packages.math.helper = packages.kernels.fast
    assert before.change()
    assert packages.reach().foreign == ()
    assert packages.reach().digest != before.digest, "another native function is other code all the same"


def test_code_in_a_module_that_the_classes_do_not_import_stays_clean(packages: Packages) -> None:
    before = packages.reach()
    packages.beside.helper = packages.foreign.exchanged
    assert not before.change()
    packages.math.helper = packages.foreign.exchanged
    assert [each.partition(".")[2] for each in packages.reach().foreign] == ["math.helper"]


def test_a_change_between_two_steps_is_named_until_it_is_undone(packages: Packages) -> None:
    reach, own = packages.reach(), packages.math.helper
    assert reach.change() == ""
    for holder, name in ((packages.math, "helper"), (packages.model.Other, "norm"), (torch.nn.functional, "softmax")):
        own = vars(holder)[name]
        setattr(holder, name, packages.foreign.exchanged)
        assert reach.change().endswith(name)
        setattr(holder, name, own)
        assert reach.change() == ""


def test_a_method_that_is_added_to_torchs_tensor_is_foreign(packages: Packages) -> None:
    reach = packages.reach()
    torch.Tensor.softmax = packages.foreign.exchanged  # type: ignore[method-assign]
    try:
        assert reach.change()
        assert reach.change() == "torch.Tensor.softmax"
        assert packages.reach().foreign == ("torch.Tensor.softmax",)
    finally:
        del torch.Tensor.softmax
    assert not reach.change()


def test_an_exchanged_function_is_not_kept_alive(packages: Packages) -> None:
    packages.model.attention = packages.foreign.wrapping(packages.math.attention)
    held = weakref.ref(packages.model.attention)
    reach = packages.reach()
    packages.model.attention = packages.math.attention
    gc.collect()
    assert held() is None
    assert reach.change(), "another function at the same address is another function"


def test_a_reach_is_found_again_only_after_an_exchange(packages: Packages) -> None:
    reaches, kinds = ReachCache(), [packages.model.Block]
    first = reaches.of(kinds)
    assert reaches.of(kinds) is first
    packages.model.attention = packages.foreign.exchanged
    second = reaches.of(kinds)
    assert second is not first
    assert second.foreign


def test_a_module_that_is_left_out_is_neither_watched_nor_followed(packages: Packages) -> None:
    reach = ReachCache({packages.math.__name__}).of([packages.model.Block, packages.model.Other])
    packages.math.helper = packages.foreign.exchanged
    assert not reach.change()
    packages.model.attention = packages.foreign.exchanged
    assert reach.change()


def test_no_class_is_kept_alive() -> None:
    """A class that is written in a function may hold the model."""

    def made() -> type:
        class Local(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return torch.nn.functional.silu(x)

        return Local

    kind, reaches = made(), ReachCache()
    reaches.of([kind])
    held = weakref.ref(kind)
    del kind
    gc.collect()
    assert held() is None


def test_a_name_that_came_by_way_of_another_module_of_the_package_is_native(packages: Packages) -> None:
    """As comfy.ops has `QuantizedTensor` from comfy.quant_ops, which has it from comfy_kitchen."""
    packages.model.attention = packages.kernels.fast  # only math.py imports that package
    assert packages.reach("Block").foreign == ()
