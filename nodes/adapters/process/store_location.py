"""Where compiled regions are stored, and a digest of the source code that they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import comfy
import folder_paths

from ....compile_cache.packages import version_of
from ..foreign.packs import add_source

_PACK = Path(__file__).resolve().parents[3]
# Our own code that traces regions and compiles them.
_TRACING = (
    "nodes/adapters/blocks", "compile_cache/backends/inductor", "compile_cache/regions", "compile_cache/attention",
)  # fmt: skip
# Packages whose code a trace of ComfyUI's blocks may include.
_PACKAGES = ("comfy-kitchen",)


def folder() -> Path:
    """A folder in ComfyUI's system user directory, which no HTTP route reads or writes."""
    return Path(folder_paths.get_system_user_directory("resolute")) / "regions"


def source() -> str:
    """A digest of all code that a trace may include, 16 hexadecimal digits. After an update of ComfyUI it differs, so
    regions compile again.

    The code that a trace does include is known only after tracing, and a stored region exists to avoid a trace.
    """
    digest = hashlib.sha256()
    # ComfyUI's folder may be listed more than once: its database adds "." to sys.path.
    roots = sorted({Path(path).resolve() for path in comfy.__path__})
    for root, files in [*((root, root.rglob("*.py")) for root in roots), (_PACK, _own())]:
        add_source(digest, root, files)
    for package in _PACKAGES:
        digest.update(f"{package} {version_of(package) or 'none'}\0".encode())
    return digest.hexdigest()[:16]


def _own() -> Iterable[Path]:
    for name in _TRACING:
        path = _PACK / name
        yield from path.rglob("*.py") if path.is_dir() else [path]
