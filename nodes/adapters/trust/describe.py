"""Describe code by its name and its pack, for people."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import PurePath
from typing import Any

from ....compile_cache.code_identity.names import NATIVE, module_of, package_of
from ....compile_cache.torch_compat.private_names import COMPILER_MODULES

_OURS = __name__.partition(".nodes.")[0]


def describe_code(code: Any) -> str:
    """The name and the pack of a function or an object: "cached_forward (Comfy-WaveSpeed)"."""
    code = _unwrapped(code)
    own = getattr(code, "__code__", None)  # `functools.wraps` copies the name of a function, not that of its code
    name = getattr(own, "co_name", None) if hasattr(code, "__wrapped__") else None
    name = name or getattr(code, "__qualname__", type(code).__qualname__).rpartition("<locals>.")[2]
    return f"{name} ({_pack_of(code)})"


def is_ours(code: Any) -> bool:
    return f"{module_of(_unwrapped(code))}.".startswith(f"{_OURS}.")


def _unwrapped(code: Any) -> Any:
    """The function under decorators of torch's, Python's and core's, or the class of an object.

    A wrapper of another pack is not unwrapped: it is the code to describe, although `functools.wraps` gave it the name
    of the function that it wraps.
    """
    while isinstance(code, functools.partial):
        code = code.func
    if not inspect.isroutine(code):
        return code if isinstance(code, type) else type(code)
    code = getattr(code, "__func__", code)
    while hasattr(code, "__wrapped__") and package_of(module_of(code)) in (*NATIVE, "comfy"):
        code = code.__wrapped__
    return code


def _pack_of(code: Any) -> str:
    """The folder in custom_nodes with the source of a function or class, else "torch.compile" or its top package."""
    module = module_of(code)
    if module.startswith(COMPILER_MODULES):
        return "torch.compile"
    parts = PurePath(getattr(sys.modules.get(module), "__file__", None) or "").parts
    if "custom_nodes" in parts[:-1]:
        return parts[parts.index("custom_nodes") + 1]
    return module.partition(".")[0]
