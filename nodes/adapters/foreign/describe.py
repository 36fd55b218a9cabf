"""Code by its name and its pack, for people."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import PurePath
from typing import Any

from ....compile_cache.foreign.names import module_of
from ....compile_cache.torch_facts.private_names import COMPILER_MODULES

_OURS = __name__.partition(".nodes.")[0]


def describe_code(code: Any) -> str:
    """A function or an object by its name and its pack: "cached_forward (Comfy-WaveSpeed)"."""
    code = _unwrapped(code)
    name = getattr(code, "__qualname__", type(code).__qualname__).rpartition("<locals>.")[2]
    return f"{name} ({_pack_of(code)})"


def is_ours(code: Any) -> bool:
    return f"{module_of(_unwrapped(code))}.".startswith(f"{_OURS}.")


def _unwrapped(code: Any) -> Any:
    """The function that was written, or the class of an object."""
    while isinstance(code, functools.partial):
        code = code.func
    if not inspect.isroutine(code):
        return code if isinstance(code, type) else type(code)
    return inspect.unwrap(getattr(code, "__func__", code))


def _pack_of(code: Any) -> str:
    """The folder in custom_nodes that a function or class was written in, else "torch.compile" or its top package."""
    module = module_of(code)
    if module.startswith(COMPILER_MODULES):
        return "torch.compile"
    parts = PurePath(getattr(sys.modules.get(module), "__file__", None) or "").parts
    if "custom_nodes" in parts[:-1]:
        return parts[parts.index("custom_nodes") + 1]
    return module.partition(".")[0]
