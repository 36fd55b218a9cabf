"""Quantized models that the user keeps: files in ComfyUI's own format, each beside its source file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import comfy.utils

from ....compile_cache.errors import UserError, first_line

_MARK = "resolute_source"
_BYTES = 1 << 16  # from the start of the file: the names and sizes of its weights


def find(path: str, name: str) -> str | None:
    """The path of the kept file for a model and a format; None if there is none or the source file changed since."""
    kept = _beside(path, name)
    if not kept.is_file():
        return None
    _, metadata = comfy.utils.load_torch_file(str(kept), return_metadata=True)
    return str(kept) if (metadata or {}).get(_MARK) == _digest(path) else None


def write(path: str, name: str, patcher: Any) -> str:
    """Save a loaded model. Returns the file's path. Raises UserError if the file cannot be written."""
    kept = _beside(path, name)
    half = kept.with_suffix(f".{os.getpid()}.part")
    state_dict = {key: each.contiguous() for key, each in patcher.model.diffusion_model.state_dict().items()}
    try:
        comfy.utils.save_torch_file(state_dict, str(half), metadata={_MARK: _digest(path)})
        half.replace(kept)
    except Exception as error:  # safetensors raises its own classes
        half.unlink(missing_ok=True)
        raise UserError(
            f"{kept.name} cannot be kept: {first_line(error)}. Free some room, or switch 'keep' off."
        ) from error
    return str(kept)


def _beside(path: str, name: str) -> Path:
    source = Path(path)
    return source.with_name(f"{source.stem}.{name}.safetensors")


def _digest(path: str) -> str:
    """A digest of the file's size, date and first bytes: reading 24 GB would take longer than quantizing them."""
    about = Path(path).stat()
    with open(path, "rb") as file:
        return hashlib.sha256(f"{about.st_size} {about.st_mtime_ns} ".encode() + file.read(_BYTES)).hexdigest()
