"""Detect changes inside values whose objects stay the same.

It compares the class of an object, the code, defaults and closure of a function, the elements of a container, and the
object that a method is bound to. Lists of equal elements are equal, and so are functions that agree in all this.

It reads the values in C, level by level, so a comparison makes a few Python calls for any number of values. Plain data
is compared by value, and an object that is not opened by identity. Nothing that may hold a model is kept alive.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from .functions import CONSISTS_OF, names_written_into

Way = Callable[[Any], Collection[Any]]

FIXED = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
WRITTEN = frozenset({list, set, dict, OrderedDict})  # containers that code may write into
NAMESPACES = (SimpleNamespace, Namespace)
_DEEPEST = 12  # levels; a closure takes three, and a dictionary two
_MOST = 20_000  # values per level
_LONGEST = 1_000  # elements of a container
_OF_FUNCTION = (False, True, None, True, False)  # see `closed` in `_add_level`

_call, _deref = partial.__call__, weakref.ref.__call__
_function = partial(attrgetter("__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__"))
_namespace = partial(vars)
_WAYS: dict[type, Way] = {
    **{kind: partial(attrgetter(*names, "__doc__")) for kind, names in CONSISTS_OF},  # one name makes no tuple
    FunctionType: _function,
    CellType: partial(attrgetter("cell_contents", "__doc__")),
    **dict.fromkeys((list, tuple, set, frozenset, torch.Size), partial(tuple)),
    **dict.fromkeys((dict, OrderedDict), partial(dict.items)),
    **dict.fromkeys(NAMESPACES, _namespace),
}
_LASTING = WRITTEN | {FunctionType, CellType, *NAMESPACES}  # classes whose objects can contain themselves


class Insides:
    """A snapshot of the insides of some values.

    references: weak references to the objects that were met but not opened, as far as their classes allow them.
    """

    def __init__(self, values: Sequence[Any], shut: Collection[int] = (), read: Collection[str] = ()) -> None:
        """shut: ids of containers that are not opened, because the code around them writes into them. read: names of
        the attributes that count in a namespace, such as one of start options; all attributes if it is empty.
        """
        self._read = read
        self.references: list[weakref.ref[Any]] = []
        self._referring: list[int] = []
        self._levels: list[tuple[Any, ...]] = []
        self._met = set[int]()  # a value that occurs again is compared by identity
        below = [(each, root, type(each) in WRITTEN and id(each) in shut) for root, each in enumerate(values)]
        while below:
            below = self._add_level(*zip(*below, strict=True))
        self._referred = list(map(id, map(_deref, self.references)))

    def _add_level(self, values: tuple[Any, ...], roots: tuple[int, ...], closed: tuple[Any, ...]) -> list[Any]:
        """Add a level. Returns the values inside these values, each with its root and its flag.

        roots: the numbers of the top-level values that contain them. closed: True: containers that code may write into
        are not opened; None: only those inside the value are not.
        """
        kinds, is_last = list(map(type, values)), len(self._levels) == _DEEPEST - 1 or len(values) > _MOST
        inside: dict[int, tuple[Way, Collection[Any]]] = {}
        for number, (value, kind) in enumerate(zip(values, kinds, strict=True)):
            if kind not in _WAYS or is_last or (closed[number] and kind in WRITTEN) or id(value) in self._met:
                continue
            if (found := self._look(value, _WAYS[kind])) is not None:
                inside[number] = found
                self._met |= {id(value)} if kind in _LASTING else set()
        without = FIXED | {MethodType, tuple} if is_last else FIXED  # each read may create these anew
        others = [number for number, kind in enumerate(kinds) if kind not in without and number not in inside]
        data = [number for number, kind in enumerate(kinds) if kind in FIXED]
        met = [number for number in others if kinds[number].__weakrefoffset__]
        self.references += [weakref.ref(values[number]) for number in met]
        self._referring += [roots[number] for number in met]
        named, plain, opened = map(getter, (others, data, list(inside)))
        seen = [*map(id, kinds), *map(id, named(values)), *plain(values)]
        owners = [*roots, *[roots[number] for number in (*others, *data)]]
        sizes = [len(found) for _, found in inside.values()]
        ways = [way for way, _ in inside.values()]
        self._levels.append((seen, owners, named, plain, opened, ways, sizes, opened(roots)))
        return [
            (each, roots[number], flag)
            for number, (_, found) in inside.items()
            for each, flag in zip(
                found,
                _OF_FUNCTION if kinds[number] is FunctionType else repeat(closed[number] is not False),
                strict=False,
            )
        ]

    def _look(self, value: Any, way: Way) -> tuple[Way, Collection[Any]] | None:
        """Return the way into a value and the values inside; None if they cannot be read or are too many."""
        if way is _function and value.__closure__ and (written := names_written_into((value.__code__,))):
            way = partial(_without, written)
        elif way is _namespace:
            names = sorted(vars(value).keys() & self._read if self._read else vars(value))
            way = partial(attrgetter("__doc__", "__class__", *names))
        try:
            inside = way(value)
        except (AttributeError, ValueError):  # an empty cell
            return None
        return None if len(inside) > _LONGEST else (way, inside)

    def difference(self, values: Sequence[Any]) -> int:
        """Return the number of the first value that changed inside; -1 if none did."""
        for before, roots, named, plain, opened, ways, sizes, holders in self._levels:
            now = [*map(id, map(type, values)), *map(id, named(values)), *plain(values)]
            if now != before:
                return _first(roots, now, before)
            try:
                inside = [*map(_call, ways, opened(values))]
            except (AttributeError, ValueError):  # a closure's variable was deleted
                return int(roots[0])
            now = [*map(len, inside)]
            if now != sizes:
                return _first(holders, now, sizes)
            values = [*chain(*inside)]
        now = [*map(id, map(_deref, self.references))]
        return -1 if now == self._referred else _first(self._referring, now, self._referred)


def _first(roots: Sequence[int], now: Sequence[Any], before: Sequence[Any]) -> int:
    return next(root for root, new, old in zip(roots, now, before, strict=False) if new != old)


def getter(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that gets the elements with these numbers."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


def _without(names: set[str], function: FunctionType) -> tuple[Any, ...]:
    """Read a function like `_function`, without the closure's variables that it writes to."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return *tuple(_function(function))[:4], tuple(cell for name, cell in cells if f".{name}" not in names)
