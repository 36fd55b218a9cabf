"""Code that another pack put into a module: no key can describe it, and a capture would repeat what it once decided."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

# Where a module that runs through the cache is hooked: what stands there is asked for its origin by who put it there.
HOOKED = frozenset({"forward", "_forward"})

_COMMON = frozenset({"torch", "comfy"})  # whose decorators may stand around any method


class ForeignCode:
    """Looks at modules; what it learns of a class it keeps, so it is good for one look at a model."""

    def __init__(self) -> None:
        self._classes: dict[type, bool] = {}

    def inside(self, module: torch.nn.Module, is_root: bool = False) -> tuple[int, ...]:
        """Marks of the foreign code in one module itself, empty where there is none; others once the code is another.

        `is_root`: it is the module that runs through the cache, and is hooked inside of whatever stands around it.
        """
        return marks_on(module, is_root) + self.marks_around(module, is_root)

    def marks_around(self, module: torch.nn.Module, is_root: bool) -> tuple[int, ...]:
        """Those that no attribute of the module shows: its hooks, and its class where that was patched."""
        # A hook's number is never used twice.
        marks = () if is_root else (*module._forward_hooks, *module._forward_pre_hooks)
        kind = type(module)
        patched = self._classes.get(kind)
        if patched is None:
            patched = self._classes[kind] = _is_patched(kind)
        return (*marks, id(kind)) if patched else marks


def marks_on(module: torch.nn.Module, is_root: bool) -> tuple[int, ...]:
    """Marks of what stands on a module in place of its class's methods."""
    return tuple([id(value) for name, value in replaced_methods(module) if not (is_root and name in HOOKED)])


def replaced_methods(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """What stands on a module in place of its class's methods, by name."""
    kind = type(module)
    for name, value in vars(module).items():
        if callable(value) and inspect.isfunction(getattr(kind, name, None)) and not is_own(module, name, value):
            yield name, value


def is_own(module: torch.nn.Module, name: str, value: Any) -> bool:
    """Whether it is the class's own method, bound: ComfyUI leaves it there when it takes an object patch back."""
    return getattr(value, "__self__", None) is module and value.__func__ is getattr(type(module), name, None)


def origin(code: Any) -> str:
    """The top-level package that a function was written in: `functools.wraps` copies what a function says of itself."""
    names = getattr(code, "__globals__", {})
    return str(names.get("__name__", getattr(code, "__module__", ""))).partition(".")[0]


def _is_patched(kind: type) -> bool:
    """Whether a forward of a class, or of one that it inherits from, comes from elsewhere than the class."""
    for each in kind.__mro__:
        if each is torch.nn.Module:
            return False
        known = {each.__module__.partition(".")[0], *_COMMON}
        if any(
            inspect.isfunction(value) and "forward" in name and origin(value) not in known
            for name, value in vars(each).items()
        ):
            return True
    return False
