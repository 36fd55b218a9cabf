"""The names that code claims for itself. `authors` verifies them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

# Packages that belong to no pack. Decorators of the last one wrap torch's methods.
NATIVE = frozenset({"builtins", "torch", *sys.stdlib_module_names, "typing_extensions"})


def module_of(code: Any) -> str:
    """Return the module that a function or class claims as its home. A function's globals decide, because
    `functools.wraps` copies `__module__`.
    """
    held = getattr(code, "__globals__", None)  # a descriptor for the class of functions
    name = held.get("__name__") if isinstance(held, dict) else None
    return str(name or getattr(code, "__module__", None) or "")


def origin(code: Any) -> str:
    """Return the top-level package that a function or class claims as its home."""
    return package_of(module_of(code))


def package_of(module: str | None) -> str:
    """Return the top-level package of a module."""
    return (module or "").partition(".")[0]


def full_name(code: Any) -> str:
    """Return a class or function by module and name. The module is `__module__`, which a wrapper may have copied."""
    return f"{getattr(code, '__module__', '')}.{code.__qualname__}"


def modules_of(parts: Iterable[torch.nn.Module]) -> set[str]:
    """Return the Python modules that define the classes of these modules."""
    return {type(part).__module__ for part in parts}


def name_of_class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
