"""Snapshot everything except weights that decides the results of a model's modules, and compare it in each call.

Each sampling run takes a snapshot when it starts. Comparing it with the last run's decides whether captures and regions
are still valid. Within a run, a wrapper with a start and an end percent may set an attribute of a block, or replace its
forward, between two steps. `change` detects that. It runs in each call, so it has to be cheap: it compares only the
attributes that the model's code reads and does not write, their contents (`Insides`), and the names around its classes.
The next run calls `change` too, so a change that a call would detect also starts a new weights epoch.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ....compile_cache.code_identity.attributes import HOOKED, is_own, marks_on
from ....compile_cache.code_identity.content import described
from ....compile_cache.code_identity.functions import (
    attributes_assigned,
    class_code,
    code_of,
    codes_in,
    functions_in,
    names_in,
    names_written_into,
)
from ....compile_cache.code_identity.insides import WRITTEN, Insides, getter
from ....compile_cache.code_identity.names import NATIVE, package_of
from ....compile_cache.code_identity.reach import CodeReach
from ....compile_cache.modules.structure import TORCH_OWN
from ..comfyui.module_attributes import ATTRIBUTES, CASTS, WEIGHT_PATCHES

Names = frozenset[str]

_FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_DATA = _FIXED | {tuple, list, set, dict, OrderedDict, torch.Tensor}  # no code
_dictionary = attrgetter("__dict__")
_MODE = "training"
_children, _mode = itemgetter("_modules"), itemgetter(_MODE)
_parameters, _buffers = itemgetter("_parameters"), itemgetter("_buffers")
_get = itemgetter.__call__
_DEEPEST = 3  # levels of objects in attributes
# By reach: names of attributes that its code reads and does not assign, that it assigns, and that it writes into.
_names: weakref.WeakKeyDictionary[CodeReach, tuple[Names, Names, Names]] = weakref.WeakKeyDictionary()


class ModuleSnapshot:
    """The modules of a model with their attributes, hooks and foreign code. It keeps no module or tensor alive.

    settings: equal in two snapshots if no module, attribute, hook, foreign code or shape of a weight changed. loading:
    which modules cast their weights, and the number of patches per weight at loading. is_foreign: other packs added
    code or hooks.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        """modules: all modules of the model; the first one is the module that runs through the cache."""
        own = list(map(_dictionary, modules))
        self._modules = tuple(map(weakref.ref, modules))  # not ids: a new module may reuse a dead one's
        self._counted = [_counted(tuple(each), not number) for number, each in enumerate(own)]
        alike: defaultdict[tuple[type, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, (module, names) in enumerate(zip(modules, self._counted, strict=True)):
            if names:
                alike[type(module), names].append(number)
        groups = [(numbers, *_columns(names, getter(numbers)(own))) for (_, names), numbers in alike.items()]
        suspects = (number for numbers, *_, is_data in groups if not is_data for number in numbers)
        marks = [(number, found) for number in suspects if (found := marks_on(modules[number], not number))]
        self._hooks, self._last_hook = _hooks_in(own), RemovableHandle.next_id
        self.is_foreign = bool(marks or self._hooks)
        kinds = list(map(weakref.ref, map(type, modules)))
        weights = chain.from_iterable(map(dict.values, chain(map(_parameters, own), map(_buffers, own))))
        shapes = [None if each is None else (each.shape, each.dtype) for each in weights]
        self.settings = (self._modules, kinds, groups, marks, self._hooks, shapes)
        casting = {kind for kind in set(map(type, modules)) if hasattr(kind, CASTS)}
        patches = [
            (name, number, each[name]) for name in WEIGHT_PATCHES for number, each in enumerate(own) if name in each
        ]
        self.loading = (
            list(map(attrgetter(CASTS), [module for module in modules if type(module) in casting])),
            [(name, number, len(functions)) for name, number, functions in patches if functions],
        )

    def watch(self, modules: Sequence[torch.nn.Module], reach: CodeReach) -> None:
        """Prepare `change` to compare with this snapshot. reach: of the classes whose code may be compiled."""
        if reach not in _names:
            _names[reach] = _names_of({*map(type, modules)})
        self._read, assigned, written = _names[reach]
        self._reach = reach
        parts: list[Any] = list(modules)
        watched = [[name for name in names if name in self._read and name != _MODE] for names in self._counted]
        self._known = list(self._counted)
        self._watch(parts, watched, written)
        for _ in range(_DEEPEST):
            met = set(map(id, parts))
            held = {id(each): each for ref in self._insides.references if _has_settings(each := ref())}
            for each in [each for number, each in held.items() if number not in met]:
                own_assigned, own_written = _writes_of(type(each))
                assigned, written = assigned | own_assigned, written | own_written
                parts.append(each)
                watched.append(sorted(vars(each).keys() - assigned))
                self._known.append((*vars(each), *assigned))
            if len(parts) > len(met):
                self._watch(parts, watched, written)
        numbers: dict[torch.nn.Module | None, int] = {None: -1, **dict(zip(modules, range(len(modules)), strict=True))}
        parents = [number for number, module in enumerate(modules) if module._modules]
        self._parents = getter(parents)  # the dictionaries of modules with children
        self._children = getter([numbers[child] for parent in parents for child in modules[parent]._modules.values()])
        self._lengths = list(map(len, map(_dictionary, parts)))

    def _watch(self, parts: Sequence[Any], watched: Sequence[Sequence[str]], written: Names) -> None:
        """parts: the modules, and objects in their attributes. watched: the names of attributes to watch, per part."""
        self._parts = tuple(map(weakref.ref, parts))
        holders = [number for number, names in enumerate(watched) if names]
        names = [[*each, *each, _MODE][: max(2, len(each))] for number in holders for each in [watched[number]]]
        self._places = [(number, name) for number, each in zip(holders, names, strict=True) for name in each]
        self._holders, self._getters = getter(holders), [itemgetter(*each) for each in names]
        own = list(map(_dictionary, parts))
        values = self._values(own)
        shut = {
            id(value)
            for (_, name), value in zip(self._places, values, strict=True)
            if name in written and type(value) in WRITTEN
        }
        self._insides, self._modes = Insides(values, shut), self._modes_of(parts, own)

    def _values(self, own: Sequence[dict[str, Any]]) -> list[Any]:
        """The values of the watched attributes."""
        return list(chain.from_iterable(map(_get, self._getters, self._holders(own))))

    def _modes_of(self, parts: Sequence[Any], own: Sequence[dict[str, Any]]) -> list[int]:
        """The class of each part, and the training mode of each module."""
        return [*map(id, map(type, parts)), *map(_mode, own[: len(self._modules)])]

    def change(self) -> str:
        """Name one thing that changed; empty if nothing did. Takes half a millisecond for 2,000 modules."""
        modules = [ref() for ref in self._parts]
        try:
            own = list(map(_dictionary, modules))
        except AttributeError:  # a module was garbage collected
            return "a part of the model"
        below = map(_children, self._parents(own))
        if list(chain.from_iterable(map(dict.values, below))) != list(self._children((*modules, None))):
            return "a part of the model"
        if self._modes_of(modules, own) != self._modes:
            return "the class or the mode of a part of the model"
        try:
            number = self._insides.difference(self._values(own))
        except KeyError:
            number = next(n for n, (part, name) in enumerate(self._places) if name not in own[part])
        if number >= 0:
            part, name = self._places[number]
            return f"{name} of {type(modules[part]).__name__}"
        lengths = list(map(len, own))
        if lengths != self._lengths:  # paging too adds and removes attributes
            for number, module in enumerate(modules):
                if lengths[number] != self._lengths[number] and (name := self._added(number, module)):
                    return f"{name} of {type(module).__name__}"
            self._lengths = lengths
        if name := self._reach.change():
            return name
        if RemovableHandle.next_id != self._last_hook:
            if _hooks_in(own[: len(self._modules)]) != self._hooks:
                return "a hook of a part of the model"
            self._last_hook = RemovableHandle.next_id
        return ""

    def _added(self, number: int, module: Any) -> str:
        """The name of a new attribute that the model's code reads or that shadows one of the class; empty if none."""
        own = vars(module)
        for name in set(_counted(tuple(own), not number)).difference(self._known[number]):
            if (name in self._read or hasattr(type(module), name)) and not is_own(module, name, own[name]):
                return name
        return ""


def _columns(names: Sequence[str], own: Sequence[dict[str, Any]]) -> tuple[list[object], bool]:
    """The attributes of modules that have the same names, plain ones by value, others by content; if all are data."""
    columns, is_data = list[object](), True
    for name in names:
        column = [each[name] for each in own]
        kinds = set(map(type, column))
        is_data = is_data and kinds <= _DATA
        is_fixed = kinds <= _FIXED or (kinds == {tuple} and _FIXED.issuperset(map(type, chain.from_iterable(column))))
        columns.append((name, column if is_fixed else list(map(described, column))))
    return columns, is_data


@functools.lru_cache(maxsize=10_000)
def _counted(names: tuple[str, ...], is_root: bool) -> tuple[str, ...]:
    """Filter the names of a module's attributes: leave out torch's own (weights, hooks, children), bookkeeping, and, on
    the root, those that Resolute replaces.
    """
    without = TORCH_OWN | HOOKED if is_root else TORCH_OWN
    return tuple(sorted(name for name in names if name not in without and not ATTRIBUTES.is_bookkeeping(name)))


def _hooks_in(own: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The ids of the hooks of each module with hooks, except the root. torch never reuses an id."""
    hooks = [(each["_forward_hooks"], each["_forward_pre_hooks"]) for each in own[1:]]
    return [(*after, *before) for after, before in hooks if after or before]


def _names_of(kinds: set[type]) -> tuple[Names, Names, Names]:
    """Three sets of attribute names: those that the code of these classes reads and does not assign, those that it
    assigns, and those whose containers it writes into.
    """
    assigned, written = _writes(function for function in class_code(kinds) if function.__name__ != "__init__")
    return frozenset(names_in(code_of(kinds)) - assigned), assigned, written


def _writes(functions: Iterable[FunctionType]) -> tuple[Names, Names]:
    """The names of attributes that these functions assign, and of attributes that they write into."""
    codes = {function.__code__ for function in functions}
    into = names_written_into(each for code in codes for each in codes_in(code))
    return Names().union(*map(attributes_assigned, codes)), Names(name[1:] for name in into if name[0] == ".")


def _writes_of(kind: type) -> tuple[Names, Names]:
    """The attributes that the code of an object's class assigns, and writes into, after `__init__`."""
    members = [item for base in kind.__mro__ for item in list(vars(base).items()) if item[0] != "__init__"]
    return _writes(function for _, value in members for function in functions_in(value))


def _has_settings(value: Any) -> bool:
    """True for an object of a class of a pack or of core, whose attributes the model's code may read."""
    is_native = package_of(type(value).__module__) in NATIVE
    return (
        not is_native
        and hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, torch.Tensor, type, enum.Enum))
    )
