"""The packs in which classes are defined: name, version, and a digest of their Python source."""

from __future__ import annotations

import ast
import functools
import hashlib
import logging
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....compile_cache.code_identity.names import module_of
from .declared import SourcePiece

logger = logging.getLogger(__name__)

# Packages whose model classes compute equal results from equal inputs: core, and packages that core requires.
KNOWN_PACKAGES = frozenset({"comfy", "comfy_extras", "comfy_kitchen", "einops", "torch", "torchvision"})

_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PROJECT = re.compile(r"^\[project\][^\n]*$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_TEXT = r"""^{}[ \t]*=[ \t]*["']([^"'\n]+)["']"""


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack on disk. `str(pack)` is its entry for RESOLUTE_TRUSTED_PACKS."""

    name: str
    version: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}:{self.source}"


def foreign_packages(kind: type) -> list[str]:
    """The top-level packages that define a class or its bases, except Python's and `KNOWN_PACKAGES`; sorted."""
    packages = {top_package(module_of(base)) for base in kind.__mro__}
    return sorted(packages - KNOWN_PACKAGES - sys.stdlib_module_names)


def top_package(module: str) -> str:
    """The package of a module. ComfyUI names a pack by its path, which may contain a dot if the pack is one file."""
    package = module.partition(".")[0]
    return module if module in sys.modules and package not in sys.modules else package


def sources_of(kind: type) -> tuple[str, ...]:
    """Digests of the source of each pack that defines a class or its bases; empty for core's own."""
    return tuple(source_of(package) for package in foreign_packages(kind))


@functools.cache
def pack_of(package: str) -> Pack | None:
    """The pack whose code is in a top-level package. None if its folder has no pyproject.toml with name and version."""
    for folder in _folders(package):
        try:
            text = (folder / "pyproject.toml").read_text("utf-8", errors="replace")
        except OSError:  # there is none
            continue
        name, version, source = _text(text, "name"), _text(text, "version"), source_of(package)
        if name and version and source:
            return Pack(name, version, source)
    return None


@functools.cache
def source_of(package: str) -> str:
    """A digest of all Python files of a top-level package, 16 hexadecimal digits; empty if they cannot be read.

    They are read once in a process, because imported code does not change with its file.
    """
    digest = hashlib.sha256()
    try:
        folders = _folders(package)
        for folder in folders:
            add_source(digest, folder, folder.rglob("*.py"))
        if not folders:  # a pack in a single file
            file = Path(sys.modules[package].__file__ or "")
            add_source(digest, file.parent, [file])
    except (OSError, KeyError, AttributeError) as error:  # KeyError, AttributeError: no such module, or no file of it
        logger.debug("Resolute: the source of %s cannot be read", package, exc_info=error)
        return ""
    return digest.hexdigest()[:16]


def files_of(kind: type, package: str) -> set[str]:
    """The files of a package that define a class or its bases, as paths below the package's folder."""
    modules = {module_of(base) for base in kind.__mro__}
    inside = (module.removeprefix(package) for module in modules if top_package(module) == package)
    return {f"{path.lstrip('.').replace('.', '/') or '__init__'}.py" for path in inside}


def matches_declared(package: str, pieces: Iterable[SourcePiece]) -> bool:
    """A pack's source has all these pieces, each in one of its known states."""
    return all(piece_digest(package, piece.file, piece.name) in piece.digests for piece in pieces)


@functools.cache
def piece_digest(package: str, file: str, name: str) -> str:
    """A digest of a file of a pack, or of one definition in it, see `SourcePiece`; empty if there is none.

    Line ends and indentation do not count. The file is read once in a process, as by `source_of`.
    """
    for folder in _folders(package):
        try:
            text = (folder / file).read_bytes().replace(b"\r\n", b"\n").decode("utf-8", errors="replace")
            text = text if not name else _definition(text, name.split("."))
        except (OSError, SyntaxError, ValueError):
            continue
        return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
    return ""


def _definition(text: str, names: Iterable[str]) -> str:
    """The source of a class or a function, without indentation; empty if there is none, or more than one."""
    node: Any = ast.parse(text)
    for name in names:
        found = [each for each in node.body if isinstance(each, _NAMED) and each.name == name]
        found += [
            each
            for inner in node.body
            if not isinstance(inner, _NAMED)
            for each in ast.walk(inner)
            if isinstance(each, _NAMED) and each.name == name
        ]
        if len(found) != 1:
            return ""
        (node,) = found
    lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def add_source(digest: Any, root: Path, files: Iterable[Path]) -> None:
    """Add the names and contents of files below `root` to a digest of hashlib's. Raises OSError.

    Line ends do not count, since git may write others on Windows.
    """
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).digest())


def _text(project_file: str, key: str) -> str:
    """A string of the table [project]; empty if absent. A regex reads it, since Python 3.10 has no TOML parser."""
    project = _PROJECT.search(project_file)
    found = re.search(_TEXT.format(key), project[1], re.MULTILINE) if project else None
    return found[1].strip() if found else ""


def _folders(package: str) -> list[Path]:
    return [Path(path) for path in getattr(sys.modules.get(package), "__path__", ())]
