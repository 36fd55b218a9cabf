"""Quantized models that a person keeps: files of ComfyUI's own beside the file that they were made of."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import comfy.utils

from ....compile_cache.errors import UserError, first_line

_MARK = "resolute_source"
_BYTES = 1 << 16  # of the file's beginning: the names and sizes of its weights


def find(path: str, name: str) -> str | None:
    """The kept file of a model in a format; None if there is none, or the model's file is another one now."""
    kept = _beside(path, name)
    if not kept.is_file():
        return None
    _, metadata = comfy.utils.load_torch_file(str(kept), return_metadata=True)
    return str(kept) if (metadata or {}).get(_MARK) == _digest(path) else None


def write(path: str, name: str, patcher: Any) -> str:
    """Keep a loaded model. Raises UserError where the disk is full or refuses."""
    kept = _beside(path, name)
    half = kept.with_suffix(f".{os.getpid()}.part")
    state_dict = {key: each.contiguous() for key, each in patcher.model.diffusion_model.state_dict().items()}
    try:
        comfy.utils.save_torch_file(state_dict, str(half), metadata={_MARK: _digest(path)})
        half.replace(kept)
    except Exception as error:  # safetensors has classes of its own
        half.unlink(missing_ok=True)
        raise UserError(
            f"{kept.name} cannot be kept: {first_line(error)}. Free some room, or switch 'keep' off."
        ) from error
    return str(kept)


def _beside(path: str, name: str) -> Path:
    source = Path(path)
    return source.with_name(f"{source.stem}.{name}.safetensors")


def _digest(path: str) -> str:
    """Of its size, its date and its beginning: to read 24 GB takes longer than to quantize them."""
    about = Path(path).stat()
    with open(path, "rb") as file:
        return hashlib.sha256(f"{about.st_size} {about.st_mtime_ns} ".encode() + file.read(_BYTES)).hexdigest()
