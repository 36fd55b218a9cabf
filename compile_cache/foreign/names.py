"""The module that code says it was written in. Every question about whose code something is ends here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def module_of(code: Any) -> str:
    """The module that a function or class was written in; a function's globals tell, since `functools.wraps` copies
    `__module__`.
    """
    return str(getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", None) or "")


def origin(code: Any) -> str:
    """The top-level package that a function or class was written in."""
    return module_of(code).partition(".")[0]


def is_written_for(function: Any, kind: type, others: Iterable[str] = ()) -> bool:
    """The author of a class wrote this function, or one of these other packages did."""
    return origin(function) in (origin(kind), *others)


def full_name(code: Any) -> str:
    """A class or a function by module and name, as `__module__` gives it: the name that a wrapper has copied counts."""
    return f"{getattr(code, '__module__', '')}.{code.__qualname__}"


def modules_of(module: torch.nn.Module) -> set[str]:
    """The Python modules in which the classes of a module and of its parts were written."""
    return {type(part).__module__ for part in module.modules()}
