"""Determine who wrote a function by its content: a module wrote the code in its file. All such checks end here.

The name, the file name and even the globals of a function can belong to another module: `functools.wraps` copies names,
`exec` runs changed source in another module, and `f.__code__` can be assigned.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from ..torch_compat.private_names import (
    contexts,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)
from .functions import CUSTOM_OPERATOR, cells_of, chain, codes_in, held_in
from .names import NATIVE, module_of, origin, package_of

WRAPPING = ("torch", "comfy")  # packages whose code may be in any module

_STARTED = time.time()
_GENERATED_FILE = "<"  # "<string>", "<attrs generated init ...>"
_GENERATORS = ("__dataclass_fields__", "__attrs_attrs__", "_field_defaults")  # of dataclasses, attrs, named tuples

_PARTIALS = (functools.partial, functools.partialmethod)
# Modules of the classes whose objects Python itself puts into modules and classes. A field of a named tuple belongs to
# `collections` since Python 3.12.
_HARMLESS = frozenset(
    {
        "_collections", "_operator", "abc", "builtins", "collections", "dataclasses", "enum", "operator",
        "types", "typing", "typing_extensions", "weakref",
    }
)  # fmt: skip

_HOOKS = (global_forward_hooks, global_forward_pre_hooks, global_backward_hooks, global_backward_pre_hooks)
# The methods that run around each forward or look up a part of a module. A torch may lack the second.
_CALLING = tuple(
    name for name in ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__") if hasattr(torch.nn.Module, name)
)

_torchs: dict[str, tuple[Any, CodeType]] = {}  # functions that were verified as torch's own, with their code
_files: weakref.WeakKeyDictionary[ModuleType, _File] = weakref.WeakKeyDictionary()


def is_written_for(value: Any, kind: type, others: Iterable[str] = ()) -> bool:
    """True if a class's author or these other packages wrote this function and all functions that it closes over."""
    return is_written_in(value, origin(kind), *others)


def is_written_in(value: Any, *packages: str) -> bool:
    """True if these packages, torch or Python itself wrote a function and all functions that it closes over. False for
    an object without a function, whose author is unknown.
    """
    written = chain(value)
    return bool(written) and all(package_of(author_of(function)) in (*packages, *NATIVE) for function in written)


def is_written_by(value: Any, module: str) -> bool:
    """True if a module wrote a function. It may have decorators of the same package, of torch or of Python."""
    return any(author_of(each) == module for each in chain(value)) and is_written_in(value, package_of(module))


def author_of(function: FunctionType) -> str:
    """Return the module that wrote a function: the one that it claims, if that one's file has the code; else empty."""
    name = module_of(function)
    package = package_of(name)
    if _is_pythons(package):
        return name
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):
        return ""
    if package != "torch" and function.__globals__ is not vars(module):
        return ""
    return name if _file_of(module).has(function.__code__) else ""


def is_foreign(home: str, value: Any) -> bool:
    """True if a value in the Python module `home`, or in a class there, is code of another author: neither of the
    module's package, nor of one that it imports, nor of torch or Python. So is a function that closes over such code.
    """
    if isinstance(value, _PARTIALS):
        return any(is_foreign(home, each) for each in (value.func, *value.args, *value.keywords.values()))
    written = chain(value)
    if written:
        if not all(_may_write(home, package_of(author_of(each))) for each in written):
            return True
        held = [(module_of(function), each) for function in written for each in held_in(cells_of(function))]
        objects = [(place, part) for place, each in held if not chain(each) for part in (each, type(each))]
        return any(is_foreign(home, each) and is_foreign(place, each) for place, each in objects)
    if isinstance(value, type):
        if _may_write(home, package_of(value.__module__)):
            return False
        # A class without its own code behaves like its bases, for example the array classes of ctypes.
        return any(map(chain, list(vars(value).values()))) or any(is_foreign(home, base) for base in value.__bases__)
    kind = type(value)
    if not (callable(value) or hasattr(kind, "__get__")):
        return False
    made_by = value.__module__ if kind is BuiltinFunctionType else kind.__module__
    package = package_of(made_by)
    if package in NATIVE and package_of(home) not in NATIVE:
        # A compiled script, an operator or a mock in place of a function runs code that no file shows.
        harmless = kind.__module__ in _HARMLESS or kind.__name__ == CUSTOM_OPERATOR
        return not (harmless or issubclass(kind, torch.nn.Module))
    return bool(package) and not _may_write(home, package)


def _may_write(home: str, package: str) -> bool:
    own = package_of(home)
    return package != "" and (package == own or package in (*NATIVE, *WRAPPING) or _is_imported(home, package))


def _is_imported(home: str, package: str) -> bool:
    """Core also binds names of other packages (comfy_kitchen's, sageattention's), sometimes through another module."""
    own = package_of(home)
    if _imports(home, package) or own in NATIVE:  # torch has thousands of modules, and binds no names of packs
        return _imports(home, package)
    inside = [name for name in list(sys.modules) if name == own or name.startswith(f"{own}.")]
    return any(_imports(module, package) for module in inside)


def _imports(module: str, package: str) -> bool:
    """True if the source of a module imports a package, anywhere in the file."""
    return package in _imported_by(module)


@functools.cache
def _imported_by(module: str) -> frozenset[str]:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        source = Path(file or "").read_text(encoding="utf-8", errors="replace")
    except OSError:  # gone, or no file
        return frozenset()
    return frozenset(re.findall(r"^\s*(?:from|import)\s+(\w+)", source, re.MULTILINE))


def _is_pythons(package: str) -> bool:
    return package in NATIVE and package != "torch"


def is_generated(kind: type, name: str, value: Any) -> bool:
    """True for generated methods such as a dataclass's `__init__`, which are in no file."""
    if not (name.startswith("__") or name in ("_make", "_replace", "_asdict")):
        return False
    made = dataclasses.is_dataclass(kind) or any(mark in vars(kind) for mark in _GENERATORS)
    own = (package_of(kind.__module__), *NATIVE)
    return made and all(
        each.__code__.co_filename.startswith(_GENERATED_FILE) or package_of(author_of(each)) in own
        for each in chain(value)
    )


def codes_of(module: Any) -> set[CodeType]:
    """Return all code objects in a module's file; empty if it cannot be read."""
    return _file_of(module).codes()


def _file_of(module: ModuleType) -> _File:
    if module not in _files:
        _files[module] = _File(module)
    return _files[module]


class _File:
    """The code in a module's file, including the code of earlier versions that this process read."""

    def __init__(self, module: ModuleType) -> None:
        self._module = weakref.ref(module)
        self._stamp: Any = None
        self._codes: set[CodeType] = set()

    def codes(self) -> set[CodeType]:
        module = self._module()
        stamp = _stamp(getattr(module, "__file__", None))
        if module is not None and (stamp != self._stamp or not self._codes):
            self._stamp = stamp
            self._codes |= _read(module)
        return self._codes

    def has(self, code: CodeType) -> bool:
        """True if the module wrote the code. If the file cannot tell (it was written after ComfyUI started, or cannot
        be read), the file name in the code decides.
        """
        if code in self._codes or code in self.codes() or self._renamed(code):
            return True
        file = getattr(self._module(), "__file__", None)
        tells = self._codes and self._stamp is not None and self._stamp[0] <= _STARTED
        return not tells and file is not None and code.co_filename == file

    def _renamed(self, code: CodeType) -> bool:
        """True for code of torch's contexts, which torch 2.15 renames when they wrap a function."""
        if contexts is None or self._module() is not contexts:
            return False
        names = {name: getattr(code, name) for name in ("co_name", "co_qualname") if hasattr(code, name)}
        found = any(each.replace(**names) == code for each in self._codes)
        if found:
            self._codes.add(code)
        return found


def _stamp(file: str | None) -> tuple[float, int] | None:
    try:
        found = Path(file or "").stat()
    except OSError:
        return None
    return found.st_mtime, found.st_size


def _read(module: ModuleType) -> set[CodeType]:
    spec = getattr(module, "__spec__", None)
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    if get_code is None:
        return set()
    try:
        code = get_code(spec.name)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001 (a loader of anybody's, and a file that may have any fault now)
        return set()
    return set(codes_in(code)) if isinstance(code, CodeType) else set()


def foreign_on_every_module() -> str:
    """Describe, as the end of a sentence, how another pack changed all torch modules of the process; empty if none did.

    Checks torch's global hooks, and the methods by which torch calls a module. Takes a microsecond.
    """
    for hooks in _HOOKS:
        if hooks:
            return "registered a hook on every module"
    for name in _CALLING:
        function = getattr(torch.nn.Module, name)
        known = _torchs.get(name)
        if known is not None and function is known[0] and function.__code__ is known[1]:
            continue
        if not hasattr(function, "__code__") or not is_written_in(function):
            return f"replaced torch.nn.Module.{name}"
        _torchs[name] = function, function.__code__
    return ""
