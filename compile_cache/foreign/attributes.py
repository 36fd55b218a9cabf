"""Find code that another pack put into a module. No key can describe it, and a capture would repeat one run of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from .names import is_written_for

# The attributes that Resolute itself replaces on a root module. `ForwardPatch` checks what was there before.
HOOKED = frozenset({"forward", "_forward"})

_COMMON = frozenset({"torch", "comfy"})  # packages whose decorators may wrap any method


class ForeignCode:
    """Searches modules. It caches results by class, so use one for one survey of a model."""

    def __init__(self) -> None:
        self._classes: dict[type, bool] = {}

    def inside(self, module: torch.nn.Module, is_root: bool = False) -> tuple[int, ...]:
        """Marks of the foreign code in one module, not in its children; empty if there is none.

        Other code has other marks. `is_root`: the module is the one that runs through the cache. Its torch hooks run
        around ours, and its `HOOKED` attributes may be ours, so neither counts.
        """
        return marks_on(module, is_root) + self.marks_around(module, is_root)

    def marks_around(self, module: torch.nn.Module, is_root: bool) -> tuple[int, ...]:
        """Marks of its torch hooks, and of its class if that was patched."""
        # torch never uses a hook's number twice.
        marks = () if is_root else (*module._forward_hooks, *module._forward_pre_hooks)
        kind = type(module)
        patched = self._classes.get(kind)
        if patched is None:
            patched = self._classes[kind] = _is_patched(kind)
        return (*marks, id(kind)) if patched else marks


def marks_on(module: torch.nn.Module, is_root: bool) -> tuple[int, ...]:
    """Marks of the instance attributes that shadow methods of the module's class."""
    return tuple([id(value) for name, value in replaced_methods(module) if not (is_root and name in HOOKED)])


def replaced_methods(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """The instance attributes that shadow methods of the module's class: (name, value)."""
    kind = type(module)
    for name, value in vars(module).items():
        if callable(value) and inspect.isfunction(getattr(kind, name, None)) and not is_own(module, name, value):
            yield name, value


def is_own(module: torch.nn.Module, name: str, value: Any) -> bool:
    """A value is the class's own bound method. ComfyUI leaves that behind when it removes an object patch."""
    return getattr(value, "__self__", None) is module and value.__func__ is getattr(type(module), name, None)


def _is_patched(kind: type) -> bool:
    """A method with "forward" in its name, of the class or a base, was written in another package."""
    for each in kind.__mro__:
        if each is torch.nn.Module:
            return False
        if any(
            inspect.isfunction(value) and "forward" in name and not is_written_for(value, each, _COMMON)
            for name, value in vars(each).items()
        ):
            return True
    return False
