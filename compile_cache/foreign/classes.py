"""Which methods of a model's classes another pack has exchanged: found once, and again when a class has changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from .authors import exchanged_in
from .content import name_of_class
from .functions import bases_of
from .watch import ClassWatch

WRAPPING = ("torch", "comfy")  # packages whose decorators may wrap any method

_known: weakref.WeakKeyDictionary[type, tuple[ClassWatch, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def exchanged(kinds: Iterable[type]) -> list[str]:
    """Full names of methods of these classes, and of those that they derive from, that other packs have exchanged."""
    return [f"{name_of_class(base)}.{name}" for base in bases_of(kinds) for name in _exchanged_in(base)]


def _exchanged_in(kind: type) -> tuple[str, ...]:
    known = _known.get(kind)
    if known is None or known[0].has_changed():
        known = _known[kind] = ClassWatch(kind), exchanged_in(kind, WRAPPING)
    return known[1]
