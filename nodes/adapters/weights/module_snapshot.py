"""Take a snapshot of all that decides how a model's modules compute, but weights, and compare it in each call.

A sampling run takes one when it starts. As a whole it says at the next run whether captures and regions are still
right. Within a run, a wrapper with a start and an end percent may set an attribute of a block, or exchange its forward,
between two steps. `change` sees that. It runs in each call, so it has to be cheap: by identity, and only the attributes
that the model's code reads, and the names around its classes.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from types import MethodType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ....compile_cache.foreign.attributes import HOOKED, is_own, marks_on
from ....compile_cache.foreign.content import described
from ....compile_cache.foreign.functions import attributes_assigned, class_code, code_of, names_in
from ....compile_cache.foreign.reach import CodeReach
from ....compile_cache.regions.structure import TORCH_OWN
from ..comfyui.module_attributes import ATTRIBUTES, CASTS, WEIGHT_PATCHES

Getter = Callable[[Any], tuple[Any, ...]]

_FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_DATA = _FIXED | {tuple, list, set, dict, OrderedDict, torch.Tensor}  # no code
_dictionary = attrgetter("__dict__")
_children = itemgetter("_modules")
_names: weakref.WeakKeyDictionary[CodeReach, frozenset[str]] = weakref.WeakKeyDictionary()


class ModuleSnapshot:
    """The modules of a model with their attributes, hooks and foreign code. It keeps nothing of the model alive.

    settings: of the modules, equal in two snapshots if nothing of that has changed. loading: whether they cast their
    weights, and how many patches these get on their way in. is_foreign: other packs put code or hooks into the modules.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        """modules: all of the model, the one that runs through the cache first."""
        own = list(map(_dictionary, modules))
        self._modules = tuple(map(weakref.ref, modules))  # by address, a new module could pass for one that is gone
        self._counted = [_counted(tuple(each), not number) for number, each in enumerate(own)]
        alike: defaultdict[tuple[type, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, (module, names) in enumerate(zip(modules, self._counted, strict=True)):
            if names:
                alike[type(module), names].append(number)
        self._groups = [_Group(kind.__name__, names, numbers, own) for (kind, names), numbers in alike.items()]
        suspects = (number for group in self._groups if not group.is_data for number in group.numbers)
        marks = [(number, found) for number in suspects if (found := marks_on(modules[number], not number))]
        self._hooks, self._last_hook = _hooks_in(own), RemovableHandle.next_id
        self.is_foreign = bool(marks or self._hooks)
        self.settings = (self._modules, [group.settings for group in self._groups], marks, self._hooks)
        casting = {kind for kind in set(map(type, modules)) if hasattr(kind, CASTS)}
        patches = [
            (name, number, each[name]) for name in WEIGHT_PATCHES for number, each in enumerate(own) if name in each
        ]
        self.loading = (
            list(map(attrgetter(CASTS), [module for module in modules if type(module) in casting])),
            [(name, number, len(functions)) for name, number, functions in patches if functions],
        )

    def watch(self, modules: Sequence[torch.nn.Module], reach: CodeReach) -> None:
        """Have `change` compare with this snapshot. reach: of the classes whose code may be compiled."""
        if reach not in _names:
            _names[reach] = _names_of({*map(type, modules)})
        self._read, self._reach = _names[reach], reach
        own = list(map(_dictionary, modules))
        for group in self._groups:
            group.watch(self._read, own)
        numbers: dict[torch.nn.Module | None, int] = {None: -1, **dict(zip(modules, range(len(modules)), strict=True))}
        parents = [number for number, module in enumerate(modules) if module._modules]
        self._parents = getter(parents)  # the dictionaries of modules with children
        self._children = getter([numbers[child] for parent in parents for child in modules[parent]._modules.values()])
        self._lengths = list(map(len, own))

    def change(self) -> str:
        """Name something that is not as it was; empty if all is. Takes half a millisecond for 2,000 modules."""
        modules = [ref() for ref in self._modules]
        try:
            own = list(map(_dictionary, modules))
        except AttributeError:  # a module is gone
            return "a part of the model"
        below = map(_children, self._parents(own))
        if list(chain.from_iterable(map(dict.values, below))) != list(self._children((*modules, None))):
            return "a part of the model"
        for group in self._groups:
            if name := group.change(own):
                return name
        lengths = list(map(len, own))
        if lengths != self._lengths:  # also by paging, which adds attributes and takes them away
            for number, module in enumerate(modules):
                if lengths[number] != self._lengths[number] and (name := self._added(number, module)):
                    return f"{name} of {type(module).__name__}"
            self._lengths = lengths
        if name := self._reach.change():
            return name
        if RemovableHandle.next_id != self._last_hook:
            if _hooks_in(own) != self._hooks:
                return "a hook of a part of the model"
            self._last_hook = RemovableHandle.next_id
        return ""

    def _added(self, number: int, module: Any) -> str:
        """A new attribute that the model's code reads, or that hides one of the module's class."""
        own = vars(module)
        for name in set(_counted(tuple(own), not number)).difference(self._counted[number]):
            if (name in self._read or hasattr(type(module), name)) and not is_own(module, name, own[name]):
                return name
        return ""


class _Group:
    """Modules of one class that have the same attributes. Plain ones are compared by value; others within a run by
    identity, and from one run to the next by content.
    """

    def __init__(self, kind: str, names: Sequence[str], numbers: list[int], own: Sequence[dict[str, Any]]) -> None:
        self.numbers, self.is_data = numbers, True
        self._kind, self._own = kind, getter(numbers)
        self._plain: dict[str, list[Any]] = {}
        self._others: list[str] = []
        mine, contents = self._own(own), []
        for name in names:
            column = [each[name] for each in mine]
            kinds = set(map(type, column))
            self.is_data = self.is_data and kinds <= _DATA
            if kinds <= _FIXED or (kinds == {tuple} and _FIXED.issuperset(map(type, chain.from_iterable(column)))):
                self._plain[name] = column
            elif all(map(_is_plain, column)):  # copies of lists, which may change in place
                self._plain[name] = [list(value) if type(value) is list else value for value in column]
            else:
                self._others.append(name)
                contents.append(list(map(described, column)))
        self.settings = (numbers, self._plain, self._others, contents)

    def watch(self, read: frozenset[str], own: Sequence[dict[str, Any]]) -> None:
        """read: the names of attributes that count."""
        plain = [name for name in self._plain if name in read]
        others = [name for name in self._others if name in read]
        self._watched = (plain, others)
        self._get, self._get_others = getter(plain), getter(others)
        self._values = list(zip(*[self._plain[name] for name in plain], strict=True)) or [()] * len(self.numbers)
        mine = self._own(own)
        self._ids, self._objects = self._identities(mine), self._objects_in(mine)

    def change(self, dictionaries: list[dict[str, Any]]) -> str:
        """The first setting that is not as it was, with the class; empty if all are."""
        own = self._own(dictionaries)
        try:
            values, ids = list(map(self._get, own)), self._identities(own)
        except KeyError as error:
            return f"{error.args[0]} of {self._kind}"
        if values == self._values and ids == self._ids:
            return ""
        if values == self._values and self._objects_in(own) == self._objects:  # a method was bound anew
            self._ids = ids
            return ""
        plain, others = self._watched
        return f"{_differing(plain, values, self._values) or _differing(others, ids, self._ids)} of {self._kind}"

    def _identities(self, own: Sequence[dict[str, Any]]) -> list[list[int]]:
        return [] if self._get_others is _nothing else [list(map(id, values)) for values in map(self._get_others, own)]

    def _objects_in(self, own: Sequence[dict[str, Any]]) -> list[Any]:
        """Like `_identities`, but equal for a method that was bound to the same object again.

        Core's LoraLoaderBypass does that at each change of hooks.
        """
        held = chain.from_iterable(map(self._get_others, own))
        return [(id(each.__self__), id(each.__func__)) if type(each) is MethodType else id(each) for each in held]


def getter(keys: Sequence[Any]) -> Getter:
    """A function that gets the items of these keys as a tuple."""
    if len(keys) == 1:  # itemgetter would return no tuple
        return lambda container: (container[keys[0]],)
    return itemgetter(*keys) if keys else _nothing


def _nothing(_: Any) -> tuple[Any, ...]:
    return ()


@functools.lru_cache(maxsize=10_000)
def _counted(names: tuple[str, ...], is_root: bool) -> tuple[str, ...]:
    """The names among those of a module's attributes that are neither torch's own (weights, hooks, children), nor
    bookkeeping, nor such as Resolute replaces on the root.
    """
    without = TORCH_OWN | HOOKED if is_root else TORCH_OWN
    return tuple(sorted(name for name in names if name not in without and not ATTRIBUTES.is_bookkeeping(name)))


def _hooks_in(own: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The numbers of the hooks on each module but the root that has some. torch never uses one twice."""
    hooks = [(each["_forward_hooks"], each["_forward_pre_hooks"]) for each in own[1:]]
    return [(*after, *before) for after, before in hooks if after or before]


def _is_fixed(value: object) -> bool:
    """A value cannot change in place, and keeps nothing alive."""
    if isinstance(value, type):
        # A class defined in a function may keep that function's variables alive.
        return "<locals>" not in value.__qualname__
    if type(value) is tuple:
        return _FIXED.issuperset(map(type, value)) or all(map(_is_fixed, value))
    return type(value) in _FIXED or isinstance(value, enum.Enum)


def _is_plain(value: Any) -> bool:
    return _is_fixed(value) or (type(value) is list and all(map(_is_fixed, value)))


def _differing(names: Sequence[str], now: Sequence[Sequence[Any]], before: Sequence[Sequence[Any]]) -> str:
    """The first of these names whose values, one list for each module, are not as they were."""
    columns = zip(names, zip(*now, strict=True), zip(*before, strict=True), strict=True)
    return next((name for name, new, old in columns if new != old), "")


def _names_of(kinds: set[type]) -> frozenset[str]:
    """The attributes that the code of these classes reads, and does not assign itself."""
    functions = [function for function in class_code(kinds) if function.__name__ != "__init__"]
    assigned = [attributes_assigned(function.__code__) for function in functions]
    return frozenset(names_in(code_of(kinds)).difference(*assigned))
