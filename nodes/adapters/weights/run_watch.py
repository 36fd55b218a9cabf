"""Notice changes of a model within one sampling run: settings of its modules, and parts that are patched meanwhile.

A wrapper with a start and an end percent may set an attribute of a block, or exchange its forward, between two steps.
The weights epoch sees that at the next run. This compares with the last inspection in each call, so it has to be cheap:
by identity, and only the attributes that the model's code reads, and the names around its classes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ....compile_cache.foreign.attributes import HOOKED, is_own
from ....compile_cache.foreign.functions import attributes_assigned, class_code, code_of, names_in
from ....compile_cache.foreign.reach import CodeReach
from ....compile_cache.regions.structure import TORCH_OWN
from ..comfyui.module_attributes import ATTRIBUTES
from .module_state import Getter, getter, is_fixed, nothing

_dictionary = attrgetter("__dict__")
_children = itemgetter("_modules")


class RunWatch:
    """Compares a model with what it was when `remember` was called. It keeps nothing of the model alive."""

    def __init__(self) -> None:
        self._of: weakref.ref[CodeReach] | None = None
        self._names: frozenset[str] = frozenset()  # of attributes that the code reads and does not assign itself
        self._methods: dict[type, frozenset[str]] = {}
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._groups: list[_Group] = []
        self._parents: Getter = nothing  # the dictionaries of modules with children
        self._children: Getter = nothing  # the children of these, in their order
        self._lengths: list[int] = []
        self._last_hook = 0

    def remember(self, modules: Sequence[torch.nn.Module], reach: CodeReach) -> None:
        """Compare with the present state from now on. modules: all of the model, the root first."""
        if self._of is None or self._of() is not reach:
            self._of = weakref.ref(reach)
            self._names, self._methods = _names_of({*map(type, modules)}), {}
        elif len(modules) == len(self._modules) and not self.change():
            return
        self._modules = [weakref.ref(module) for module in modules]
        numbers = {id(module): number for number, module in enumerate(modules)}
        parents = [number for number, module in enumerate(modules) if module._modules]
        children = [child for number in parents for child in modules[number]._modules.values()]
        self._parents = getter(parents)
        self._children = getter([-1 if child is None else numbers[id(child)] for child in children])
        self._groups = _groups_of(modules, self._names)
        self._lengths = [len(vars(module)) for module in modules]
        self._last_hook = RemovableHandle.next_id

    def change(self) -> str:
        """Name something that is not as it was; empty if all is. Takes half a millisecond for 2,000 modules."""
        modules = [ref() for ref in self._modules]
        try:
            dictionaries = list(map(_dictionary, modules))
        except AttributeError:  # a module is gone
            return "a part of the model"
        own = map(_children, self._parents(dictionaries))
        if list(chain.from_iterable(map(dict.values, own))) != list(self._children((*modules, None))):
            return "a part of the model"
        for group in self._groups:
            name = group.change(dictionaries)
            if name:
                return name
        lengths = list(map(len, dictionaries))
        if lengths != self._lengths:
            # Paging adds attributes and takes them away. A method that hides the class's own is no such attribute.
            for module, length, before in zip(modules, lengths, self._lengths, strict=True):
                if length != before and (name := self._patched(module, module is modules[0])):
                    return f"{name} of {type(module).__name__}"
            self._lengths = lengths
        reach = None if self._of is None else self._of()
        if reach is not None and (name := reach.change()):
            return name
        if RemovableHandle.next_id != self._last_hook:
            if any(own["_forward_hooks"] or own["_forward_pre_hooks"] for own in dictionaries[1:]):
                return "a hook of a part of the model"
            self._last_hook = RemovableHandle.next_id
        return ""

    def _patched(self, module: Any, is_root: bool) -> str:
        kind = type(module)
        methods = self._methods.get(kind)
        if methods is None:
            own = {name for base in kind.__mro__ for name, value in vars(base).items() if callable(value)}
            methods = self._methods[kind] = frozenset(own)
        own = vars(module)
        if methods.isdisjoint(own):
            return ""
        found = (name for name in methods.intersection(own) if not (is_root and name in HOOKED))
        return next((name for name in found if not is_own(module, name, own[name])), "")


class _Group:
    """Modules of one class that have the same attributes. Plain ones are compared by value, others by identity."""

    __slots__ = ("_get", "_get_others", "_ids", "_kind", "_names", "_own", "_values")

    def __init__(
        self, kind: type, names: Sequence[str], numbers: list[int], modules: Sequence[torch.nn.Module]
    ) -> None:
        own = [vars(modules[number]) for number in numbers]
        plain = [name for name in names if all(_is_plain(each[name]) for each in own)]
        others = [name for name in names if name not in plain]
        self._kind, self._own, self._names = kind.__name__, getter(numbers), (plain, others)
        self._get, self._get_others = getter(plain), getter(others)
        # Copies of lists, which may change in place.
        self._values = [tuple(map(copy.copy, values)) for values in map(self._get, own)]
        self._ids = self._identities(own)

    def change(self, dictionaries: list[dict[str, Any]]) -> str:
        """The first setting that is not as it was, with the class; empty if all are."""
        own = self._own(dictionaries)
        try:
            values, ids = list(map(self._get, own)), self._identities(own)
        except KeyError as error:
            return f"{error.args[0]} of {self._kind}"
        if values == self._values and ids == self._ids:
            return ""
        plain, others = self._names
        return f"{_differing(plain, values, self._values) or _differing(others, ids, self._ids)} of {self._kind}"

    def _identities(self, own: Sequence[dict[str, Any]]) -> list[list[int]]:
        return [] if self._get_others is nothing else [list(map(id, values)) for values in map(self._get_others, own)]


def _differing(names: Sequence[str], now: Sequence[Sequence[Any]], before: Sequence[Sequence[Any]]) -> str:
    """The first of these names whose values, one list for each module, are not as they were."""
    columns = zip(names, zip(*now, strict=True), zip(*before, strict=True), strict=True)
    return next((name for name, new, old in columns if new != old), "")


def _is_plain(value: Any) -> bool:
    return is_fixed(value) or (type(value) is list and all(map(is_fixed, value)))


def _groups_of(modules: Sequence[torch.nn.Module], names: Collection[str]) -> list[_Group]:
    found: dict[tuple[type, tuple[str, ...]], list[int]] = {}
    for number, module in enumerate(modules):
        own = [name for name in vars(module) if name in names]
        if not number:
            own = [name for name in own if name not in HOOKED]
        if own:
            found.setdefault((type(module), tuple(own)), []).append(number)
    return [_Group(kind, own, numbers, modules) for (kind, own), numbers in found.items()]


def _names_of(kinds: set[type]) -> frozenset[str]:
    assigned = [
        attributes_assigned(function.__code__) for function in class_code(kinds) if function.__name__ != "__init__"
    ]
    names = names_in(code_of(kinds)).difference(*assigned) - TORCH_OWN
    return frozenset(name for name in names if not ATTRIBUTES.is_bookkeeping(name))
