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
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from ...errors import CaptureError
from ...foreign.names import modules_of
from ...regions.slots import all_parts
from ...regions.structure import TORCH_OWN

_ABSENT = object()
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})  # the last two not in every Python

_CONTAINERS = (list, tuple, dict, deque)
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})

_Tensors = dict[int, torch.Tensor]  # by id; held, so that no later tensor gets one of these ids
_NOTHING = _Tensors()
# For each module its dictionary, a copy of it, and the tensors in each attribute that has some.
_Attributes = list[tuple[dict[str, Any], dict[str, Any], dict[str, _Tensors]]]


@contextlib.contextmanager
def refused_if_read(module: torch.nn.Module | None) -> Iterator[None]:
    """Around a call outside a capture. Raises CaptureError if it keeps a tensor that the model's code may read."""
    before = _attributes(module)
    yield
    for own, name in _kept_since(before):
        if module is not None and _is_read(module, name):
            kind = next(type(each).__name__ for each in all_parts(module) if each.__dict__ is own)
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


def _attributes(module: torch.nn.Module | None) -> _Attributes:
    inside: dict[int, _Tensors] = {}
    every = [] if module is None else [part.__dict__ for part in all_parts(module)]
    return [(own, dict(own), _held(own, inside)) for own in every]


def _held(own: dict[str, Any], inside: dict[int, _Tensors]) -> dict[str, _Tensors]:
    return {
        name: tensors
        for name, value in own.items()
        if name not in TORCH_OWN and type(value) not in _PLAIN and (tensors := _tensors_in(value, inside))
    }


def _tensors_in(value: Any, inside: dict[int, _Tensors]) -> _Tensors:
    """inside: the tensors in each container that this walk has seen, by the container's id.

    DynamicVRAM gives all modules one dictionary with an entry for each of them: a walk looks into it once, not once
    for each module. A container that holds itself ends the same way.
    """
    if isinstance(value, torch.Tensor):
        return {id(value): value}
    if not isinstance(value, _CONTAINERS) or not value:
        return _NOTHING
    if (known := id(value)) not in inside:
        inside[known] = tensors = _Tensors()
        for each in value.values() if isinstance(value, dict) else value:
            if type(each) not in _PLAIN:
                tensors.update(_tensors_in(each, inside))
    return inside[known]


def _kept_since(before: _Attributes) -> list[tuple[dict[str, Any], str]]:
    """The attributes with tensors that were not there before."""
    inside: dict[int, _Tensors] = {}
    return [
        (own, name)
        for own, _, known in before
        for name, tensors in _held(own, inside).items()
        if name not in known or not tensors.keys() <= known[name].keys()
    ]


def _put_back(before: _Attributes) -> list[Any]:
    """Returns what was there instead."""
    known = {id(own): attributes for own, attributes, _ in before}
    displaced = []
    for own, name in _kept_since(before):
        displaced.append(own.pop(name))
        value = known[id(own)].get(name, _ABSENT)
        if value is not _ABSENT:
            own[name] = value
    return displaced


def _is_read(module: torch.nn.Module, name: str) -> bool:
    """The name is read anywhere in the Python modules that the model's classes are written in."""
    files, seen = sorted(modules_of(module) & sys.modules.keys()), set[int]()
    return any(_reads(code, name) for file in files for code in _code_in(vars(sys.modules[file]), seen))


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
