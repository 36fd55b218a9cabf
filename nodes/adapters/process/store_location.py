"""Where compiled regions are kept over restarts, and the source code that they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import comfy
import folder_paths

_PACK = Path(__file__).resolve().parents[3]
# What traces regions and turns them into code, of our own.
_TRACING = ("nodes/adapters/blocks", "compile_cache/backends/inductor", "compile_cache/regions/structure.py")
# Packages whose code a trace of ComfyUI's blocks can run through.
_PACKAGES = ("comfy-kitchen",)


def folder() -> Path:
    """In ComfyUI's folder for the system's own data, which no HTTP route reads or writes."""
    return Path(folder_paths.get_system_user_directory("resolute")) / "regions"


def source() -> str:
    """A digest of all code that a trace can run through: an update of ComfyUI compiles again.

    Which of it a trace did run through is known only by tracing, and that is what a stored region saves.
    """
    told = hashlib.sha256()
    # ComfyUI's folder may stand there more than once: its database adds "." to sys.path, again when it is created.
    roots = sorted({Path(path).resolve() for path in comfy.__path__})
    for root, files in [*((root, root.rglob("*.py")) for root in roots), (_PACK, _own())]:
        for file in sorted(files):
            told.update(file.relative_to(root).as_posix().encode() + b"\0")
            told.update(hashlib.sha256(file.read_bytes()).digest())
    for package in _PACKAGES:
        told.update(f"{package} {_version(package)}\0".encode())
    return told.hexdigest()[:16]


def _own() -> Iterable[Path]:
    for name in _TRACING:
        path = _PACK / name
        yield from path.rglob("*.py") if path.is_dir() else [path]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
