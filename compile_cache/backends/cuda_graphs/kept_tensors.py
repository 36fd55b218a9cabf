"""Tensors that a forward keeps on its modules, as `self.embedding = ...` does.

One that is made inside a capture lies in the memory of the graphs. There the next replay writes over it, and a module
would keep it longer than its graph. If the model's code never reads the attribute (it is for logging), the module gets
back what it had before. If it may, a later call depends on an earlier one, and the forward is not captured.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from ...errors import CaptureError
from ...foreign.names import modules_of
from ...regions.structure import TORCH_OWN
from ...torch_facts.private_names import pytree

_ABSENT = object()
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})  # the last two not in every Python

# For each module its dictionary, and each attribute there with the ids of the tensors in it.
_Attributes = list[tuple[dict[str, Any], dict[str, tuple[Any, list[int]]]]]


@contextlib.contextmanager
def refused_if_read(module: torch.nn.Module | None) -> Iterator[None]:
    """Around a call outside a capture. Raises CaptureError if it keeps a tensor that the model's code may read."""
    before = _attributes(module)
    yield
    for own, name in _kept_since(before):
        kind = next(type(each).__name__ for each in _modules(module) if vars(each) is own)
        if _is_read(module, name):
            raise CaptureError(
                f"the forward cannot be captured: it keeps a tensor as {kind}.{name}, which a later call may read"
            )


@contextlib.contextmanager
def put_back(module: torch.nn.Module | None) -> Iterator[None]:
    """Around a call inside a capture: no attribute of a module has a tensor that the call made, however it ends.

    An error holds them, so that `keep_for_good` keeps them too.
    """
    before = _attributes(module)
    try:
        yield
    except Exception as error:
        vars(error)["tensors"] = _put_back(before)
        raise
    except BaseException:  # a cancel: they go while the capture still runs
        _put_back(before)
        raise
    _put_back(before)


def _modules(module: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [] if module is None else list(module.modules())


def _attributes(module: torch.nn.Module | None) -> _Attributes:
    return [
        (own, {name: (value, _tensors_in(value)) for name, value in own.items() if name not in TORCH_OWN})
        for own in map(vars, _modules(module))
    ]


def _tensors_in(value: Any) -> list[int]:
    if not isinstance(value, (torch.Tensor, list, tuple, dict)):
        return []
    return [id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _kept_since(before: _Attributes) -> list[tuple[dict[str, Any], str]]:
    """The attributes with tensors that were not there before."""
    return [
        (own, name)
        for own, known in before
        for name, value in own.items()
        if name not in TORCH_OWN and not set(_tensors_in(value)) <= set(known.get(name, (None, []))[1])
    ]


def _put_back(before: _Attributes) -> list[Any]:
    """Returns what was there instead."""
    known = {id(own): attributes for own, attributes in before}
    displaced = []
    for own, name in _kept_since(before):
        displaced.append(own.pop(name))
        value = known[id(own)].get(name, (_ABSENT, []))[0]
        if value is not _ABSENT:
            own[name] = value
    return displaced


def _is_read(module: torch.nn.Module | None, name: str) -> bool:
    """The name is read anywhere in the Python modules that the model's classes are written in."""
    files = modules_of(module) & sys.modules.keys() if module is not None else ()
    seen: set[int] = set()
    return any(_reads(code, name) for file in sorted(files) for code in _code_in(vars(sys.modules[file]), seen))


def _code_in(members: Mapping[str, Any], seen: set[int]) -> Iterator[CodeType]:
    """Of all functions and of all methods of classes; of a decorated one what its author wrote."""
    for value in list(members.values()):
        if isinstance(value, type) and id(value) not in seen:
            seen.add(id(value))
            yield from _code_in(vars(value), seen)
        method: Any = value.fget if isinstance(value, property) else value
        written = inspect.unwrap(method)
        if isinstance(written, FunctionType):
            yield written.__code__


def _reads(code: CodeType, name: str) -> bool:
    if name in code.co_consts:  # `getattr`
        return True
    if name in code.co_names and any(
        step.opname in _READS and step.argval == name for step in dis.get_instructions(code)
    ):
        return True
    return any(_reads(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))
