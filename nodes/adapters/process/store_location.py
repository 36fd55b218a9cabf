"""Where compiled regions are stored, and a digest of our code that makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import folder_paths

from ....compile_cache.packages import version_of
from ..foreign.packs import add_source

_PACK = Path(__file__).resolve().parents[3]
# Our own code that traces regions and compiles them.
_TRACING = (
    "nodes/adapters/blocks", "compile_cache/backends/inductor", "compile_cache/regions", "compile_cache/attention",
)  # fmt: skip
# Packages whose code a trace of ComfyUI's blocks includes, and no region's key.
_PACKAGES = ("comfy-kitchen",)


def folder() -> Path:
    """A folder in ComfyUI's system user directory, which no HTTP route reads or writes."""
    return Path(folder_paths.get_system_user_directory("resolute")) / "regions"


def source() -> str:
    """A digest of our code that makes regions, 16 hexadecimal digits. ComfyUI's is in the key of each region, as far as
    the region reaches it, so an update of ComfyUI compiles only what it changed.
    """
    digest = hashlib.sha256()
    add_source(digest, _PACK, _own())
    for package in _PACKAGES:
        digest.update(f"{package} {version_of(package) or 'none'}\0".encode())
    return digest.hexdigest()[:16]


def _own() -> Iterable[Path]:
    for name in _TRACING:
        path = _PACK / name
        yield from path.rglob("*.py") if path.is_dir() else [path]
