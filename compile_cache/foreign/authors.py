"""Tell who wrote a function by its content: a module wrote what its file has in it. Every such question ends here.

A name, a file name and even the globals of a function can be those of another module: `functools.wraps` copies names,
`exec` runs changed source in another module, and `f.__code__` can be assigned.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .content import code_digest
from .functions import chain
from .names import NATIVE, module_of, origin, package_of

_STARTED = time.time()
_GENERATED_FILE = "<"  # "<string>", "<attrs generated init ...>"
_GENERATORS = ("__dataclass_fields__", "__attrs_attrs__", "_field_defaults")  # of dataclasses, attrs, named tuples

_files: weakref.WeakKeyDictionary[ModuleType, _File] = weakref.WeakKeyDictionary()


def is_written_for(value: Any, kind: type, others: Iterable[str] = ()) -> bool:
    """The author of a class wrote this function, or one of these other packages did, and all that it closes over."""
    return is_written_in(value, origin(kind), *others)


def is_written_in(value: Any, *packages: str) -> bool:
    """These packages, torch or Python itself wrote a function, and all functions that it closes over."""
    return all(package_of(author_of(function)) in (*packages, *NATIVE) for function in chain(value))


def is_written_by(value: Any, module: str) -> bool:
    """A module wrote a function; around it there may be decorators of the same package, of torch's or of Python's."""
    return any(author_of(each) == module for each in chain(value)) and is_written_in(value, package_of(module))


def author_of(function: FunctionType) -> str:
    """The module that wrote a function: the one that it says, if that one's file has this code; empty otherwise."""
    name = module_of(function)
    package = package_of(name)
    if _is_pythons(package):
        return name
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):
        return ""
    if package != "torch" and function.__globals__ is not vars(module):
        return ""
    if module not in _files:
        _files[module] = _File(module)
    return name if _files[module].has(function.__code__) else ""


def exchanged_in(kind: type, others: Iterable[str]) -> tuple[str, ...]:
    """Names of members of one class that were written neither for that class nor in these packages."""
    if _is_pythons(package_of(kind.__module__)):
        return ()
    members = list(vars(kind).items())
    return tuple(
        name
        for name, value in members
        if not _is_generated(kind, name, value) and not is_written_for(value, kind, others)
    )


def _is_pythons(package: str) -> bool:
    return package in NATIVE and package != "torch"


def _is_generated(kind: type, name: str, value: Any) -> bool:
    """A dataclass's own `__init__` and its like, which no file has."""
    if not (name.startswith("__") or name in ("_make", "_replace", "_asdict")):
        return False
    made = dataclasses.is_dataclass(kind) or any(mark in vars(kind) for mark in _GENERATORS)
    own = (package_of(kind.__module__), *NATIVE)
    return made and all(
        each.__code__.co_filename.startswith(_GENERATED_FILE) or package_of(author_of(each)) in own
        for each in chain(value)
    )


class _File:
    """The code in the file of a module."""

    def __init__(self, module: ModuleType) -> None:
        self._module = weakref.ref(module)
        self._stamp: Any = None
        self._codes: set[str] = set()

    def has(self, code: CodeType) -> bool:
        """The file has this code, or had it when it was read before.

        Where the file says nothing of what runs (it was written after ComfyUI started, or there is none to read), the
        name of the file that the code gives decides.
        """
        digest = code_digest(code)
        if digest in self._codes:
            return True
        module = self._module()
        if module is None:
            return False
        file = getattr(module, "__file__", None)
        stamp = _stamp(file)
        if stamp != self._stamp or not self._codes:
            self._stamp = stamp
            self._codes |= _codes_of(module)
        if digest in self._codes:
            return True
        tells = self._codes and stamp is not None and stamp[0] <= _STARTED
        return not tells and file is not None and code.co_filename == file


def _stamp(file: str | None) -> tuple[float, int] | None:
    try:
        found = Path(file or "").stat()
    except OSError:
        return None
    return found.st_mtime, found.st_size


def _codes_of(module: ModuleType) -> set[str]:
    """Digests of all code in the file of a module; empty if it cannot be read."""
    spec = getattr(module, "__spec__", None)
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    if get_code is None:
        return set()
    try:
        code = get_code(spec.name)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001 (a loader of anybody's, and a file that may have any fault now)
        return set()
    return set(_all_codes(code)) if isinstance(code, CodeType) else set()


def _all_codes(code: CodeType) -> Iterable[str]:
    yield code_digest(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)
