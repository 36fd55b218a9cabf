"""The names that code goes by. They are what it says of itself: `authors` tells whether that is so."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

# Packages that are no pack's. Decorators of the last one are around methods of torch's.
NATIVE = frozenset({"builtins", "torch", *sys.stdlib_module_names, "typing_extensions"})


def module_of(code: Any) -> str:
    """The module that a function or class says it was written in; a function's globals tell, since `functools.wraps`
    copies `__module__`.
    """
    held = getattr(code, "__globals__", None)  # of the class of functions a descriptor
    name = held.get("__name__") if isinstance(held, dict) else None
    return str(name or getattr(code, "__module__", None) or "")


def origin(code: Any) -> str:
    """The top-level package that a function or class says it was written in."""
    return package_of(module_of(code))


def package_of(module: str | None) -> str:
    """The top-level package of a module."""
    return (module or "").partition(".")[0]


def full_name(code: Any) -> str:
    """A class or a function by module and name, as `__module__` gives it: the name that a wrapper has copied counts."""
    return f"{getattr(code, '__module__', '')}.{code.__qualname__}"


def modules_of(parts: Iterable[torch.nn.Module]) -> set[str]:
    """The Python modules in which the classes of these modules were written."""
    return {type(part).__module__ for part in parts}


def name_of_class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
