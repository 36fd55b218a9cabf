"""Tensors that a forward keeps: on its modules, as `self.embedding = ...` does, and in caches of functions.

One that is made inside a capture lies in the memory of the graphs. There the next replay writes over it, and a module
would keep it longer than its graph. If the model's code never reads the attribute (it is for logging), the module gets
back what it had before. If it may, a later call depends on an earlier one, and the forward is not captured.

What functions and methods keep (`functools.lru_cache`) is made anew in each rehearsal and capture: nothing would hold
it while replays read it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from ...errors import CaptureError
from ...foreign.names import modules_of
from ...regions.slots import all_parts
from ...regions.structure import TORCH_OWN

_ABSENT = object()
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})  # the last two not in every Python

_Tensors = dict[int, torch.Tensor]  # by id; held, so that no later tensor gets one of these ids
# For each module its dictionary, a copy of it, and the tensors in each attribute that has some.
_Attributes = list[tuple[dict[str, Any], dict[str, Any], dict[str, _Tensors]]]


class _Look(dict[type, Any]):
    """One look at a model: by class what its values are, a tensor, a container or neither.

    inside: the tensors in each container that was met, by its id. DynamicVRAM gives all modules one dictionary with an
    entry for each of them. It is looked into once, not once for each module, and so is a container that holds itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[int, _Tensors] = {}

    def __missing__(self, kind: type) -> Any:
        found = (base for base in (torch.Tensor, dict, list, tuple, deque) if issubclass(kind, base))
        self[kind] = next(found, None)
        return self[kind]

    def held(self, own: dict[str, Any]) -> dict[str, _Tensors]:
        """The tensors of each attribute that has some."""
        found: dict[str, _Tensors] = {}
        for name, value in own.items():
            kind = self[type(value)]
            if kind is None or name in TORCH_OWN:
                continue
            if kind is torch.Tensor:
                found[name] = {id(value): value}
            elif value and (tensors := self.tensors_in(value, kind)):
                found[name] = tensors
        return found

    def tensors_in(self, container: Any, kind: type) -> _Tensors:
        if (own := id(container)) in self.inside:
            return self.inside[own]
        self.inside[own] = tensors = _Tensors()
        for each in container.values() if kind is dict else container:
            kind_of_each = self[type(each)]
            if kind_of_each is torch.Tensor:
                tensors[id(each)] = each
            elif kind_of_each is not None and each:
                tensors.update(self.tensors_in(each, kind_of_each))
        return tensors


@contextlib.contextmanager
def refused_if_read(module: torch.nn.Module | None) -> Iterator[None]:
    """Around a call outside a capture. Raises CaptureError if it keeps a tensor that the model's code may read."""
    parts = _parts(module)
    files = modules_of(parts)
    clear_caches(files)
    before = _attributes(parts)
    yield
    for own, name in _kept_since(before):
        if _is_read(files, name):
            kind = next(type(each).__name__ for each in parts if each.__dict__ is own)
            raise CaptureError(
                f"the forward cannot be captured: it keeps a tensor as {kind}.{name}, which a later call may read"
            )


@contextlib.contextmanager
def put_back(module: torch.nn.Module | None) -> Iterator[None]:
    """Around a call inside a capture: no attribute of a module and no cache of a function has a tensor that the call
    made, however it ends.

    An error holds them, so that `keep_for_good` keeps them too.
    """
    parts = _parts(module)
    files = modules_of(parts)
    clear_caches(files)
    before = _attributes(parts)
    try:
        yield
    except Exception as error:
        vars(error)["tensors"] = [*_put_back(before), *map(_contents, _caches_in(files))]
        raise
    except BaseException:  # a cancel: they go while the capture still runs
        _put_back(before)
        raise
    finally:
        clear_caches(files)
    _put_back(before)


def clear_caches(files: Iterable[str]) -> None:
    """Empty the caches (`functools.lru_cache`) of the functions and methods that these Python modules define."""
    for cache in _caches_in(files):
        cache.cache_clear()


def _caches_in(files: Iterable[str]) -> list[functools._lru_cache_wrapper[Any]]:
    """`type(each)` in place of `isinstance`: these modules have thousands of names, and each capture asks."""
    found: list[Any] = []
    for file in files:
        members = list(vars(sys.modules[file]).values()) if file in sys.modules else []
        classes = [each for each in members if type(each) is type and each.__module__ == file]
        own = [method for kind in classes for method in vars(kind).values()]
        found += [each for each in (*members, *own) if type(each) is functools._lru_cache_wrapper]
    return found


def _contents(cache: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """The results in a cache, which has no name for them."""
    held = [each for each in gc.get_referents(cache) if type(each) is dict]
    return [value for each in held for value in each.values()]


def _parts(module: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [] if module is None else list(all_parts(module))


def _attributes(parts: Iterable[torch.nn.Module]) -> _Attributes:
    look = _Look()
    return [(own, dict(own), look.held(own)) for own in [part.__dict__ for part in parts]]


def _kept_since(before: _Attributes) -> list[tuple[dict[str, Any], str]]:
    """The attributes with tensors that were not there before."""
    look = _Look()
    return [
        (own, name)
        for own, _, known in before
        for name, tensors in look.held(own).items()
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


def _is_read(files: Iterable[str], name: str) -> bool:
    """The name is read anywhere in these Python modules."""
    known, seen = [each for each in files if each in sys.modules], set[int]()
    return any(_reads(code, name) for file in known for code in _code_in(vars(sys.modules[file]), seen))


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
