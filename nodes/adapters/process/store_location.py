"""Where compiled regions are stored, and digests of our code that makes them and of ComfyUI's that they are made of."""

from __future__ import annotations

import hashlib
from pathlib import Path

import comfy
import folder_paths

from ....compile_cache.packages import version_of
from ..trust.packs import add_source

_PACK = Path(__file__).resolve().parents[3]
# Folders of our own code that traces regions and compiles them.
_TRACING = (
    "nodes/adapters/blocks", "compile_cache/backends/inductor", "compile_cache/modules", "compile_cache/attention",
)  # fmt: skip
# Packages whose code is part of traces of ComfyUI's blocks, but of no region's key.
_PACKAGES = ("comfy-kitchen",)


def folder() -> Path:
    """A folder in ComfyUI's system user directory, which no HTTP route reads or writes."""
    return Path(folder_paths.get_system_user_directory("resolute")) / "regions"


def application() -> str:
    """ "ComfyUI" and a digest of its source, 16 hexadecimal digits. Another one compares stored regions before use."""
    digest = hashlib.sha256()
    # ComfyUI's folder may be listed more than once: its database adds "." to sys.path.
    for root in sorted({Path(path).resolve() for path in comfy.__path__}):
        add_source(digest, root, root.rglob("*.py"))
    return f"ComfyUI {digest.hexdigest()[:16]}"


def source() -> str:
    """A digest of our code that makes regions, 16 hexadecimal digits. The key of each region has ComfyUI's code, as far
    as the region reaches it, so an update of ComfyUI compiles only what it changed.
    """
    digest = hashlib.sha256()
    add_source(digest, _PACK, [file for name in _TRACING for file in (_PACK / name).rglob("*.py")])
    for package in _PACKAGES:
        digest.update(f"{package} {version_of(package) or 'none'}\0".encode())
    return digest.hexdigest()[:16]
