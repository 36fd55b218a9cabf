"""Find code that another pack put into a module. No key can describe it, and a capture would repeat one run of it.

`exchanged` finds the code that it put into a class.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from .authors import is_foreign

# The attributes that Resolute itself replaces on a root module. `ForwardPatch` checks the replaced values.
HOOKED = frozenset({"forward", "_forward", "decode", "encode"})
_DATA = frozenset(
    {type(None), bool, int, float, str, tuple, list, set, dict, OrderedDict, torch.Tensor}
)  # not callable


def marks_in(module: torch.nn.Module, is_root: bool = False) -> tuple[int, ...]:
    """Return marks of the foreign code in one module, not in its children; empty if there is none.

    Different code has different marks. `is_root`: the module is the one that runs through the cache. Its torch hooks
    run around ours, and its `HOOKED` attributes may be ours, so neither counts.
    """
    # torch never reuses a hook's number.
    hooks = () if is_root else (*module._forward_hooks, *module._forward_pre_hooks)
    return marks_on(module, is_root) + hooks


def marks_on(module: torch.nn.Module, is_root: bool) -> tuple[int, ...]:
    """Return marks of the instance attributes that shadow methods of the module's class, and of attributes with code of
    another author than the class, for example a pack's wrapper of a function that a block keeps.
    """
    home = type(module).__module__
    return tuple(
        [
            id(value)
            for name, value in vars(module).items()
            if type(value) not in _DATA and not (is_root and name in HOOKED)
            if (callable(value) and _replaces(module, name, value)) or _is_foreign_inside(home, value)
        ]
    )


def replaced_methods(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Return the instance attributes that shadow methods of the module's class: (name, value)."""
    return [(name, value) for name, value in vars(module).items() if callable(value) and _replaces(module, name, value)]


def _is_foreign_inside(home: str, value: Any) -> bool:
    """True if the value, an object's class, or a function in an object's own dictionary is foreign."""
    if is_foreign(home, value):
        return True
    own = () if isinstance(value, (FunctionType, type)) else getattr(value, "__dict__", {}).values()
    return is_foreign(home, type(value)) or any(callable(each) and is_foreign(home, each) for each in own)


def _replaces(module: torch.nn.Module, name: str, value: Any) -> bool:
    return inspect.isfunction(getattr(type(module), name, None)) and not is_own(module, name, value)


def is_own(module: torch.nn.Module, name: str, value: Any) -> bool:
    """True if a value is the class's own bound method, which ComfyUI leaves behind when it removes an object patch."""
    return getattr(value, "__self__", None) is module and value.__func__ is getattr(type(module), name, None)
