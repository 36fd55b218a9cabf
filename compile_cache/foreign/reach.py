"""The code that a model can run, by its content, and whether another pack has exchanged some of it.

Packs assign to `comfy.ldm.modules.attention.optimized_attention` or `torch.nn.functional.scaled_dot_product_attention`
to put their own function there for everybody, exchange a method of one of core's classes, or run changed source in
core's own module. No such change touches a module of the model, so nothing else here would notice it.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ..keys import repr_digest
from .authors import is_written_in
from .classes import exchanged
from .content import name_of_class, value_digest
from .functions import bases_of, changed_defaults, functions_in
from .names import NATIVE, module_of, package_of
from .reachable import GlobalName, Reachable, reachable
from .watch import ClassWatch, FunctionWatch, Held, identity, members_of


class CodeReach:
    """The code and the data that some classes can reach, as they were when this was made.

    foreign: names of what holds code of a package that nothing in its own package imports, or that no file has: module-
        level names and classes.
    digest: of all that code and data by content: the same in every process that has the same.
    """

    def __init__(self, kinds: Iterable[type], left_out: Collection[str] = ()) -> None:
        """left_out: names of modules and functions that compute nothing. They are neither watched nor followed."""
        kinds = list(kinds)
        found = reachable(kinds, left_out)
        classes = sorted([*bases_of(kinds), *found.classes], key=name_of_class)
        self.names = sorted(found.code, key=str)
        held = [(place, place.value()) for place in self.names]
        self._held = [(place, Held(value)) for place, value in held]
        self._data = [(place, identity(place.value())) for place in sorted(found.data, key=str)]
        self._classes = [ClassWatch(kind) for kind in classes]
        self._functions = [FunctionWatch(function) for function in found.functions.values()]
        foreign = [str(place) for place, value in held if _is_foreign(place, value)]
        foreign += exchanged(classes)
        self.foreign = tuple(dict.fromkeys(foreign))
        self.digest = _digest(found, held, classes)

    def has_changed(self) -> bool:
        """Some code or data is not what it was when this was made. Takes half a millisecond for a whole model."""
        return (
            any(before.has_changed(place.value()) for place, before in self._held)
            or any(watch.has_changed() for watch in self._functions)
            or any(watch.has_changed() for watch in self._classes)
            or any(identity(place.value()) != before for place, before in self._data)
        )


class ReachCache:
    """The reach of classes, found once for each set of classes and again where something was exchanged.

    It keeps no class alive: one that is written in a function may hold a model. left_out: see CodeReach.
    """

    def __init__(self, left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        self._known: dict[frozenset[int], tuple[list[weakref.ref[type]], CodeReach]] = {}

    def of(self, kinds: Iterable[type]) -> CodeReach:
        """The present reach of some classes."""
        distinct = set(kinds)
        key = frozenset(map(id, distinct))
        refs, reach = self._known.get(key, ([], None))
        if reach is None or any(ref() is None for ref in refs) or reach.has_changed():
            reach = CodeReach(distinct, self._left_out)
            self._known[key] = ([weakref.ref(kind) for kind in distinct], reach)
        return reach


def _digest(found: Reachable, held: Iterable[tuple[GlobalName, Any]], classes: Iterable[type]) -> str:
    changed = changed_defaults(found.functions.values())
    whole = [(str(place), _described(value, changed)) for place, value in held]
    whole += [(str(place), value_digest(place.value())) for place in sorted(found.data, key=str)]
    for kind in classes:
        name = name_of_class(kind)
        code, data = members_of(kind)
        is_native = package_of(kind.__module__) in NATIVE
        whole += [(f"{name}.{member}", _described(value, changed, is_native)) for member, value in (*code, *data)]
    # What a decorator closes over, and functions of modules that are reached by way of another one.
    whole += sorted(("", value_digest(each, changed)) for each in found.functions.values() if _counts(each))
    return repr_digest(whole)


def _counts(function: FunctionType) -> bool:
    return package_of(module_of(function)) not in NATIVE


def _described(value: Any, changed: Collection[str], by_name: bool = False) -> str:
    """By content; torch's and Python's own code by name, because the environment's digest has their versions.

    changed: see `changed_defaults`.
    """
    home = _home(value)
    is_named = isinstance(value, (FunctionType, BuiltinFunctionType, type))  # a partial has the name of its class
    if (by_name or (is_named and package_of(home) in NATIVE)) and is_written_in(value):
        return f"{home}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value_digest(value, changed)


def _is_foreign(place: GlobalName, value: Any) -> bool:
    own = package_of(place.module)
    packages = {package_of(module_of(each)) for each in functions_in(value)} or {package_of(_home(value))}
    allowed = [each for each in packages if each in ("", own) or each in NATIVE or _is_imported(place, each)]
    return len(allowed) < len(packages) or not is_written_in(value, own, *allowed)


def _is_imported(place: GlobalName, package: str) -> bool:
    """Core binds names of other packages too (comfy_kitchen's, sageattention's), sometimes by way of another module."""
    own = package_of(place.module)
    if _imports(place.module, package) or own in NATIVE:  # torch has thousands of modules, and binds nothing of packs
        return _imports(place.module, package)
    inside = [name for name in list(sys.modules) if name == own or name.startswith(f"{own}.")]
    return any(_imports(module, package) for module in inside)


def _home(value: Any) -> str:
    """The module whose code a value runs. A decorator copies `__module__` to its wrapper, its globals it cannot."""
    for function in functions_in(value):
        return str(function.__globals__.get("__name__", ""))
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, (BuiltinFunctionType, type)) or kind.__module__ == "builtins":
        return str(getattr(value, "__module__", None) or "")
    return str(kind.__module__)


@functools.cache
def _imports(module: str, package: str) -> bool:
    """The source of a module imports a package, anywhere in the file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        source = Path(file or "").read_text(encoding="utf-8", errors="replace")
    except OSError:  # gone, or no file
        return False
    return re.search(rf"^\s*(?:from|import)\s+{re.escape(package)}\b", source, re.MULTILINE) is not None
