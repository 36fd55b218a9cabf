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
from ...regions.structure import TORCH_OWN

_ABSENT = object()
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})  # the last two not in every Python

_HOLDERS = (torch.Tensor, list, tuple, dict, deque)

_Tensors = dict[int, torch.Tensor]  # by id; held, so that no later tensor gets one of these ids
# For each module its dictionary, a copy of it, and the tensors in each attribute that has some.
_Attributes = list[tuple[dict[str, Any], dict[str, Any], dict[str, _Tensors]]]


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
    inside: dict[int, _Tensors] = {}
    return [(own, dict(own), _held(own, inside)) for own in map(vars, _modules(module))]


def _held(own: dict[str, Any], inside: dict[int, _Tensors]) -> dict[str, _Tensors]:
    return {
        name: tensors
        for name, value in own.items()
        if isinstance(value, _HOLDERS) and name not in TORCH_OWN and (tensors := _tensors_in(value, inside))
    }


def _tensors_in(value: Any, inside: dict[int, _Tensors]) -> _Tensors:
    """inside: the tensors in each container that this walk has seen, by the container's id.

    DynamicVRAM gives all modules one dictionary with an entry for each of them: a walk looks into it once, not once
    for each module. A container that holds itself ends the same way.
    """
    if isinstance(value, torch.Tensor):
        return {id(value): value}
    if id(value) not in inside:
        inside[id(value)] = tensors = _Tensors()
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, _HOLDERS):
                tensors.update(_tensors_in(each, inside))
    return inside[id(value)]


def _kept_since(before: _Attributes) -> list[tuple[dict[str, Any], str]]:
    """The attributes with tensors that were not there before."""
    inside: dict[int, _Tensors] = {}
    return [
        (own, name)
        for own, _, known in before
        for name, tensors in _held(own, inside).items()
        if not tensors.keys() <= known.get(name, {}).keys()
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
