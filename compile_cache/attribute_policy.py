"""Attributes that an application keeps in its modules beside what they compute with. Its adapter describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _no_sources(_: type) -> tuple[str, ...]:
    return ()


def _no_layout(_: type) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ModuleAttributePolicy:
    """The way to read the attributes of an application's modules.

    bookkeeping: names of attributes that change without changing the computation; bookkeeping_endings: the same by how
        a name ends.
    switch: an attribute that is False where it is missing, and another that each class has whose code reads it.
    casts: the attribute that says whether a module may convert its weights before use; "" if there is none.
    weight_patches: attributes with functions that change a weight before use.
    sources: digests of the code of a class that is neither the application's own nor torch's; its name says too little.
    knows_layout: a class of weights that consist of several tensors is one whose operations a trace can follow.
    """

    bookkeeping: frozenset[str] = frozenset()
    bookkeeping_endings: tuple[str, ...] = ()
    switch: tuple[str, str] = ("", "")
    casts: str = ""
    weight_patches: tuple[str, ...] = ()
    sources: Callable[[type], tuple[str, ...]] = _no_sources
    knows_layout: Callable[[type], bool] = _no_layout

    def is_bookkeeping(self, name: str) -> bool:
        return name in self.bookkeeping or name.endswith(self.bookkeeping_endings)

    def may_cast(self, module: object) -> bool:
        """True if a module has the means to convert or patch its weights before use."""
        return bool(self.casts) and hasattr(module, self.casts)

    def casts_now(self, module: object) -> bool:
        """True if it converts weights of another dtype at present."""
        return bool(getattr(module, self.casts))

    def patches_weights(self, module: object) -> bool:
        """True if a function changes a weight before use at present."""
        return any(getattr(module, name, None) for name in self.weight_patches)


PLAIN = ModuleAttributePolicy()
