"""How to interpret the attributes that an application adds to its modules. Its adapter describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _no_sources(_: type) -> tuple[str, ...]:
    return ()


def _no_layout(_: type) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ModuleAttributePolicy:
    """Describes how to interpret the attributes of an application's modules.

    bookkeeping: names of attributes that may change without affecting the computation. bookkeeping_endings: suffixes of
        such names.
    switch: an attribute whose absence means False, and a second one that every class has whose code reads the first.
    casts: the attribute that is true while a module converts its weights before use; "" if there is none.
    weight_patches: attributes that list functions which change a weight before use.
    sources: returns digests of the code of a class from neither the application nor torch: its name is not enough.
    knows_layout: returns True for a class of multi-tensor weights whose operations can be traced.
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
        """True if a module is able to convert or patch its weights before use."""
        return bool(self.casts) and hasattr(module, self.casts)

    def casts_now(self, module: object) -> bool:
        """True if a module that `may_cast` currently converts weights of another dtype."""
        return bool(getattr(module, self.casts))

    def patches_weights(self, module: object) -> bool:
        """True if the module currently has a function that changes a weight before use."""
        return any(getattr(module, name, None) for name in self.weight_patches)


PLAIN = ModuleAttributePolicy()
