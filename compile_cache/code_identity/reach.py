"""The code around some classes, by identity and by content, and the changes that other packs make to it.

Packs assign to `comfy.ldm.modules.attention.optimized_attention` or `torch.nn.functional.scaled_dot_product_attention`
to replace the function for everybody, replace a method of one of core's classes, or run changed source in core's own
module. No such change touches a module of the model, so nothing else here would notice it.

Bytecode is not followed. Every name counts in the Python modules of the classes, in the modules of the same package
that these import, in the classes themselves, and in torch's three namespaces of functions. Code that is reached in
another way is in no digest: where the application's source changed, stored code is compared anew before its first use.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Collection, Iterable
from itertools import chain as chained
from operator import is_, methodcaller
from types import CodeType, ModuleType
from typing import Any

import torch

from ..keys import repr_digest
from .authors import codes_of, is_foreign, is_generated
from .content import code_digest, described
from .functions import bases_of, functions_in, names_behind, names_left_behind, names_used, names_written_into
from .insides import NAMESPACES, WRITTEN, Insides
from .names import NATIVE, module_of, name_of_class, package_of

_TORCHS = (torch, torch.nn.functional, torch.Tensor)
_values = methodcaller("values")


class CodeReach:
    """A snapshot of the names around some classes.

    foreign: names of code whose package nothing in their own package imports, or that is in no file.
    digest: of the content of all their values, and of the functions with such names in the files that are left out:
        equal in every process with equal content.
    unknown: a name whose value no digest can describe, with the value's class; empty if there is none.
    """

    def __init__(self, kinds: Collection[type], spaces: Spaces) -> None:
        self._spaces, self._named, left_out = spaces.around(kinds)
        kept = [space for space in self._spaces if not space.is_local]
        self._local = [space for space in self._spaces if space.is_local]
        self._holders = [space.holder for space in kept]
        self._values = list(chained.from_iterable(space.values for space in kept))
        watched = [(f"{space.name}.{name}", value) for space in kept for name, value in space.kept(self._named)]
        self._names, self._kept = [name for name, _ in watched], [value for _, value in watched]
        self._insides = Insides(self._kept, set[int]().union(*(space.shut for space in kept)), self._named)
        matter = [(space, name) for space in self._spaces for name in space.counted if space.matters(name, self._named)]
        self.foreign = tuple(f"{space.name}.{name}" for space, name in matter if name in space.foreign)
        held = [(space.name, name, *found) for space, name in matter for found in space.described(name, self._named)]
        own = sorted(code_digest(code) for code in left_out if code.co_name in self._named)
        self.digest = repr_digest(([each[:4] for each in held], own))[:32]
        self.unknown = next((f"'{space}.{name}' is a {found}" for space, name, _, _, found in held if found), "")

    def change(self) -> str:
        """Return a name whose object was replaced or has changed inside; empty if there is none. Takes a tenth of a
        millisecond, and a few calls in Python.
        """
        now = list(chained.from_iterable(map(_values, self._holders)))
        is_same = len(now) == len(self._values) and all(map(is_, now, self._values))
        looked_at = self._local if is_same else [space for space in self._spaces if not space.is_same()]
        found = next((f"{space.name}.{name}" for space in looked_at for name in space.exchanged(self._named)), "")
        if not (is_same or found):  # the model uses none of the replaced names: they are the new baseline
            self._values = [each for space in self._spaces if not space.is_local for each in space.values_now()]
        if not found and (number := self._insides.difference(self._kept)) >= 0:
            return self._names[number]
        return found


class ReachCache:
    """The reach of classes, built once for each set of classes, and again after a change.

    It keeps no class alive, because a class that is defined in a function may hold a model.
    """

    def __init__(self, left_out: Collection[str] = ()) -> None:
        """left_out: names of modules and functions ("package.module.function") that compute nothing. They do not count,
        and such a module is not followed.
        """
        self._spaces = _spaces(frozenset(left_out))
        self._known: dict[frozenset[int], tuple[list[weakref.ref[type]], CodeReach]] = {}

    def of(self, kinds: Iterable[type]) -> CodeReach:
        """Return the current reach of some classes."""
        distinct = set(kinds)
        key = frozenset(map(id, distinct))
        refs, reach = self._known.get(key, ([], None))
        if reach is None or any(ref() is None for ref in refs) or reach.change():
            reach = CodeReach(distinct, self._spaces)
            self._known[key] = ([weakref.ref(kind) for kind in distinct], reach)
        return reach


class Spaces:
    """Reads the names of modules and classes, once per process, and again after a change."""

    def __init__(self, left_out: Collection[str]) -> None:
        self._left_out = left_out
        self._known: weakref.WeakKeyDictionary[Any, Space] = weakref.WeakKeyDictionary()

    def around(self, kinds: Iterable[type]) -> tuple[list[Space], set[str], set[CodeType]]:
        """Return the spaces of these classes and their bases; of their Python modules and the modules that these import
        from the same package, with the classes in them that are named and their bases; and of torch's functions.

        Also returns the names by which their code can reach values: names in the code, and in the values of such names.
        The third value is the code in the files that are left out.
        """
        bases = bases_of(kinds)
        modules, left_out = dict[Any, Space](), set[CodeType]()
        waiting: list[Any] = [sys.modules.get(base.__module__) for base in bases if not _is_native(base.__module__)]
        while waiting:
            module = waiting.pop()
            if module is not None and module.__name__ in self._left_out:
                left_out |= codes_of(module)
            elif module is not None and module not in modules:
                modules[module] = self._of(module)
                waiting += modules[module].followed()
        named = set[str]().union(*map(names_behind, bases))
        new = named
        while new:
            new = set[str]().union(*(space.used_by(name) for space in modules.values() for name in new)) - named
            named = named | new
        helpers = [kind for space in modules.values() for kind in space.classes(named)]
        inherited = [base for base in bases_of(helpers) if not _is_native(base.__module__)]
        owners: dict[Any, None] = dict.fromkeys((*_TORCHS, *bases, *inherited))
        others = [self._of(owner) for owner in owners if _name(owner) not in self._left_out]
        return sorted((*modules.values(), *others), key=lambda space: space.name), named, left_out

    def _of(self, owner: ModuleType | type) -> Space:
        known = self._known.get(owner)
        if known is None or known.has_changed():
            known = self._known[owner] = Space(owner, self._left_out)
        return known


@functools.cache
def _spaces(left_out: frozenset[str]) -> Spaces:
    return Spaces(left_out)


class Space:
    """A snapshot of the names of one Python module or class.

    values: the values of its dictionary, with a placeholder for those that may hold a model and must not be kept alive.
    foreign: names of code that is neither the package's own, nor of one that it imports, nor torch's or Python's.
    counted: the names that count.
    """

    def __init__(self, owner: ModuleType | type, left_out: Collection[str]) -> None:
        self._owner = weakref.ref(owner)
        self._left_out = left_out
        self.name = _name(owner)
        self.is_local = "<locals>" in self.name
        home = owner.__module__ if isinstance(owner, type) else self.name
        self._may_grow = owner in _TORCHS[:2]  # torch creates names at their first use
        is_followed = isinstance(owner, ModuleType) and not self._may_grow
        self._own_memory = names_left_behind(codes_of(owner)) if is_followed else set[str]()
        held = dict(owner.__dict__)
        counted = {name: value for name, value in held.items() if self._counts(name, value)}
        made = {name for name, value in counted.items() if isinstance(owner, type) and is_generated(owner, name, value)}
        self.foreign = [name for name, value in counted.items() if name not in made and is_foreign(home, value)]
        self.counted, self._described = sorted(counted), dict[str, list[tuple[str, str, str]]]()
        self._uses = {name: names_behind(value) for name, value in counted.items()} if is_followed else {}
        self._is_by_name = not isinstance(owner, type) or owner is torch.Tensor
        local = {name for name, value in counted.items() if not _is_native(home) and _is_local(value)}
        let_go = counted.keys() if self.is_local else {*self.foreign, *(local - made)}
        self._let_go = {name: Insides([counted[name]]) for name in let_go}
        self._kept = {name: value for name, value in counted.items() if name not in let_go}
        self.values = self.values_now()
        self._names = frozenset(held)
        containers = {name: id(value) for name, value in self._kept.items() if type(value) in WRITTEN}
        written = names_written_into(codes_of(sys.modules.get(home))) if containers else set[str]()
        dot = "." if isinstance(owner, type) else ""
        self._written = {name for name in containers if name in written or f"{dot}{name}" in written}
        self.shut = {containers[name] for name in self._written}
        # `CodeReach` watches the options that are read: core sets some that no model's code reads.
        self._watched = [value for value in self._kept.values() if not isinstance(value, NAMESPACES)]
        self._insides = Insides(self._watched, self.shut)

    def described(self, name: str, named: Collection[str]) -> list[tuple[str, str, str]]:
        """Return (attribute, digest, class of an unknown part) for the value of a name: one entry, or for a namespace
        one for each attribute in `named`.
        """
        value = self.holder.get(name)
        if isinstance(value, NAMESPACES):
            return [(each, *_digest(vars(value)[each])) for each in sorted(vars(value).keys() & named)]
        if name not in self._described:
            self._described[name] = [("", *_digest(() if name in self._written else value))]
        return self._described[name]

    def kept(self, named: Collection[str]) -> list[tuple[str, Any]]:
        """Return the names that matter and their values, without values that may hold a model."""
        return [each for each in self._kept.items() if each[0] in named or not self._is_by_name]  # as `matters`

    def values_now(self) -> list[Any]:
        return [_LET_GO if name in self._let_go else value for name, value in self.holder.items()]

    @property
    def holder(self) -> Any:
        owner = self._owner()
        return {} if owner is None else owner.__dict__

    def _counts(self, name: str, value: Any) -> bool:
        """False for names that do not affect the computation: torch's that begin with an underscore, in other owners
        the data that Python puts into each module and class, and `names_left_behind`.
        """
        if isinstance(value, ModuleType) or name in self._own_memory or f"{self.name}.{name}" in self._left_out:
            return False
        return not name.startswith("_") if self._may_grow else not name.startswith("__") or callable(value)

    def followed(self) -> list[ModuleType]:
        """Return the modules of the same package that this one imports, or from which it imports names."""
        package, held = package_of(self.name), self.holder
        names = set[str]().union(*map(names_used, codes_of(self._owner())))
        found: dict[ModuleType, None] = {}
        waiting = [held[name] for name in names & held.keys()]
        while waiting:
            value = waiting.pop()
            place = value if isinstance(value, ModuleType) else sys.modules.get(module_of(value))
            if place is None or place in found or package_of(place.__name__) != package:
                continue
            found[place] = None
            if hasattr(place, "__path__"):  # a package contains its imported modules
                inside = [vars(place)[name] for name in names & vars(place).keys()]
                waiting += [each for each in inside if isinstance(each, ModuleType)]
        return list(found)

    def used_by(self, name: str) -> frozenset[str]:
        """Return the names in the code of a module-level name's value."""
        return self._uses.get(name, _NONE)

    def classes(self, named: Collection[str]) -> list[type]:
        """Return the classes of the same package that these names refer to here, or whose instances they refer to."""
        held, package = self.holder, package_of(self.name)
        values = [held[name] for name in held.keys() & named]
        kinds = dict.fromkeys(value if isinstance(value, type) else type(value) for value in values)
        return [kind for kind in kinds if package_of(kind.__module__) == package]

    def matters(self, name: str, named: Collection[str] | None) -> bool:
        """True if code with these names (None: any) can reach this name here. A class's methods may run unnamed."""
        return named is None or name in named or not self._is_by_name

    def exchanged(self, named: Collection[str] | None = None) -> list[str]:
        """Return names whose object was replaced, or that are new or gone. named: see `matters`."""
        now = self.holder
        found = [name for name, value in self._kept.items() if now.get(name, _LET_GO) is not value]
        found += [name for name, held in self._let_go.items() if held.difference([now.get(name, _LET_GO)]) >= 0]
        new = [] if self._may_grow else [name for name in list(now) if name not in self._names]
        if new and isinstance(owner := self._owner(), ModuleType):  # it may hide a builtin
            used = _NONE.union(*map(names_used, codes_of(owner)))
            new = [name for name in new if name in used]
        found += [name for name in new if self._counts(name, now[name])]
        return [name for name in found if self.matters(name, named)]

    def is_same(self) -> bool:
        """True if each name, even one that does not count, still refers to the same object."""
        now = list(self.holder.values())
        return len(now) == len(self.values) and all(map(is_, now, self.values))

    def has_changed(self) -> bool:
        is_other = not self.is_same() and (self._owner() is None or bool(self.exchanged()))
        return is_other or self._insides.difference(self._watched) >= 0


_LET_GO = object()
_NONE = frozenset[str]()


def _digest(value: Any) -> tuple[str, str]:
    """Return the digest of a value's content, and the class of its first unknown part; empty if there is none."""
    unknown: list[str] = []
    data = described(value, unknown)
    return repr_digest(data), unknown[0] if unknown else ""


def _is_local(value: Any) -> bool:
    """True for a function or a class that is defined in a function."""
    return any("<locals>" in getattr(each, "__qualname__", "") for each in (value, *functions_in(value)))


def exchanged(kinds: Iterable[type]) -> list[str]:
    """Return the members of these classes and their bases that other packs have replaced."""
    spaces = map(_spaces(frozenset())._of, bases_of(kinds))
    return [f"{space.name}.{name}" for space in spaces for name in space.foreign]


def _name(owner: ModuleType | type) -> str:
    return name_of_class(owner) if isinstance(owner, type) else owner.__name__


def _is_native(module: str) -> bool:
    return package_of(module) in NATIVE
