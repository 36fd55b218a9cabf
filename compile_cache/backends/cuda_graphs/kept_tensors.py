"""Tensors that a forward keeps: on its modules (`self.embedding = ...`), and in caches of functions.

A tensor made inside a capture lies in the graphs' memory pool: the next replay overwrites it, and the module would keep
it longer than the graph lives. If the model's code never reads the attribute (it is for logging), we restore its
previous value. If the code may read it, a later call depends on an earlier one, and the forward is not captured.

Each rehearsal and capture clears `functools.lru_cache` of functions and methods, so that their results are computed
again: otherwise nothing would keep a cached tensor alive while replays read it.
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

from ...code_identity.names import modules_of
from ...errors import CaptureError
from ...modules.slots import all_parts
from ...modules.structure import TORCH_OWN

_ABSENT = object()
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})  # not every Python has the last two

_Tensors = dict[int, torch.Tensor]  # by id; keeps the tensors alive, so that no later tensor reuses one of these ids
# For each module: its `__dict__`, a copy of it, and the tensors of each attribute that contains some.
_Attributes = list[tuple[dict[str, Any], dict[str, Any], dict[str, _Tensors]]]


class _TensorScan(dict[type, Any]):
    """One scan of a model for tensors. Maps each class to its base: torch.Tensor, a container type, or None.

    inside: the tensors in each visited container, by the container's id. So each container is scanned once: DynamicVRAM
    gives all modules one shared dictionary with an entry per module, and a container may contain itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[int, _Tensors] = {}

    def __missing__(self, kind: type) -> Any:
        found = (base for base in (torch.Tensor, dict, list, tuple, deque) if issubclass(kind, base))
        self[kind] = next(found, None)
        return self[kind]

    def held(self, own: dict[str, Any]) -> dict[str, _Tensors]:
        """The tensors of each attribute that contains some, by attribute name."""
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
def forbid_retained_reads(module: torch.nn.Module | None) -> Iterator[None]:
    """Wrap a call outside a capture. Raises CaptureError if the call keeps a tensor that the model's code may read."""
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
def restore_attributes(module: torch.nn.Module | None) -> Iterator[None]:
    """Wrap a call inside a capture: afterwards no module attribute and no function cache contains a tensor that the
    call made, even if the call raises.

    Attaches the removed tensors to an error of the call, so that `leak_tensors` leaks them too.
    """
    parts = _parts(module)
    files = modules_of(parts)
    clear_caches(files)
    before = _attributes(parts)
    try:
        yield
    except Exception as error:
        vars(error)["tensors"] = [*_restore_attributes(before), *map(_contents, _caches_in(files))]
        raise
    except BaseException:  # a cancel: free the tensors while the capture is still open
        _restore_attributes(before)
        raise
    finally:
        clear_caches(files)
    _restore_attributes(before)


def clear_caches(files: Iterable[str]) -> None:
    """Clear the `functools.lru_cache` of each function and method that these Python modules define."""
    for cache in _caches_in(files):
        cache.cache_clear()


def _caches_in(files: Iterable[str]) -> list[functools._lru_cache_wrapper[Any]]:
    """Compares `type(each)`, faster than `isinstance`: the modules have thousands of names, scanned at each capture."""
    found: list[Any] = []
    for file in files:
        members = list(vars(sys.modules[file]).values()) if file in sys.modules else []
        classes = [each for each in members if type(each) is type and each.__module__ == file]
        own = [method for kind in classes for method in vars(kind).values()]
        found += [each for each in (*members, *own) if type(each) is functools._lru_cache_wrapper]
    return found


def _contents(cache: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """The results in a cache, read through the garbage collector: `lru_cache` has no public access to them."""
    held = [each for each in gc.get_referents(cache) if type(each) is dict]
    return [value for each in held for value in each.values()]


def _parts(module: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [] if module is None else list(all_parts(module))


def _attributes(parts: Iterable[torch.nn.Module]) -> _Attributes:
    look = _TensorScan()
    return [(own, dict(own), look.held(own)) for own in [part.__dict__ for part in parts]]


def _kept_since(before: _Attributes) -> list[tuple[dict[str, Any], str]]:
    """The attributes that contain a tensor which they did not contain before."""
    look = _TensorScan()
    return [
        (own, name)
        for own, _, known in before
        for name, tensors in look.held(own).items()
        if name not in known or not tensors.keys() <= known[name].keys()
    ]


def _restore_attributes(before: _Attributes) -> list[Any]:
    """Restore the attributes' previous values. Returns the values that the call had set."""
    known = {id(own): attributes for own, attributes, _ in before}
    displaced = []
    for own, name in _kept_since(before):
        displaced.append(own.pop(name))
        value = known[id(own)].get(name, _ABSENT)
        if value is not _ABSENT:
            own[name] = value
    return displaced


def _is_read(files: Iterable[str], name: str) -> bool:
    """True if any code in these Python modules reads an attribute of this name."""
    known, seen = [each for each in files if each in sys.modules], set[int]()
    return any(_reads(code, name) for file in known for code in _code_in(vars(sys.modules[file]), seen))


def _code_in(members: Mapping[str, Any], seen: set[int]) -> Iterator[CodeType]:
    """The code of all functions, methods and property getters; of a decorated function, the code its author wrote."""
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
