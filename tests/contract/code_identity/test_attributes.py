"""Code that another pack put into a module is found, even if it carries the name of the original."""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.code_identity.attributes import is_own, marks_in
from compile_cache.code_identity.reach import exchanged


class Module(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def of_a_pack(function: Callable[..., Any]) -> Any:
    """The same function as if it had been written in the file of another pack."""
    return types.FunctionType(
        function.__code__, {**globals(), "__name__": "some_pack.speed"}, function.__name__, None, function.__closure__
    )


@of_a_pack
def theirs(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


def inside(module: nn.Module, is_root: bool = False) -> tuple[int, ...]:
    return marks_in(module, is_root)


@pytest.mark.parametrize(
    "module", [Module(), Decorated(), nn.Conv2d(1, 1, 1), nn.Sequential(), nn.MultiheadAttention(4, 2)]
)
def test_a_class_is_its_own(module: nn.Module) -> None:
    assert inside(module) == ()
    assert exchanged(map(type, module.modules())) == []


def test_a_method_of_the_class_that_was_put_back_is_its_own() -> None:
    module = Module()
    vars(module)["forward"] = module.forward
    assert is_own(module, "forward", vars(module)["forward"])
    assert inside(module) == ()


@pytest.mark.parametrize("name", ["forward", "helper"])
def test_any_method_that_was_replaced_on_a_module_is_foreign(name: str) -> None:
    module = Module()
    setattr(module, name, types.MethodType(theirs, module))
    assert inside(module)
    assert inside(Module()) == ()


def test_at_the_root_the_place_of_our_own_hook_does_not_count() -> None:
    module = Module()
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert inside(module)
    assert inside(module, is_root=True) == ()
    module.helper = lambda x: x  # type: ignore[method-assign]
    assert inside(module, is_root=True)


def test_a_function_that_the_class_does_not_have_is_a_setting() -> None:
    module = Module()
    module.activation = torch.nn.functional.silu
    assert inside(module) == ()


def test_plain_data_in_a_class_that_a_library_made_is_no_code() -> None:
    """DynamicVRAM hangs such an array, of a class that ctypes made in pynvml's name, on each loaded Linear."""
    module = Module()
    kind = ctypes.c_uint * 3
    module._v_signature = type("c_uint_Array_3", (kind,), {"__module__": "pynvml"})()
    assert inside(module) == ()
    changed = type("Code", (kind,), {"__module__": "some_pack", "__len__": of_a_pack(lambda self: 0)})
    module._v_signature = changed()
    assert inside(module)


def test_a_hook_is_foreign_but_at_the_root_where_it_runs_around_ours() -> None:
    module = Module()
    module.register_forward_hook(lambda *_: None)
    assert inside(module)
    assert inside(module, is_root=True) == ()


def test_other_code_has_other_marks() -> None:
    module = Module()
    marks = []
    for _ in range(2):
        module.forward = functools.partial(theirs, module)  # type: ignore[method-assign]
        marks.append((inside(module), module.forward))  # kept: an address could be handed out again
    assert marks[0][0] != marks[1][0]
