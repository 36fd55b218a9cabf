"""Finds a checkpoint's model family from its safetensors header, without loading it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from ..errors import SetupError

# Width of the conditioning in the UNet's cross attention -> family; SD2 uses the workflow of SD1.5.
_FAMILIES = {768: "sd15", 1024: "sd15", 2048: "sdxl"}
_CROSS_ATTENTION = ".attn2.to_k.weight"
_MAX_HEADER = 100_000_000  # bytes


def family_of(path: Path) -> str:
    """``sd15`` or ``sdxl``. Raises SetupError for a file that the bundled workflows cannot use."""
    if not path.is_file():
        raise SetupError(f"There is no checkpoint {path}. Give the path of a .safetensors file.")
    names = _header(path)
    widths = {
        entry["shape"][1]
        for name, entry in names.items()
        if name.startswith("model.diffusion_model.") and name.endswith(_CROSS_ATTENTION)
    }
    families = {_FAMILIES.get(width) for width in widths}
    family = families.pop() if len(families) == 1 else None
    if family is None:
        raise SetupError(
            f"{path.name} has no UNet of SD1.5, SD2 or SDXL, which the bundled workflows need. "
            "Give a full checkpoint (UNet, text encoder and VAE in one file) of one of those."
        )
    if not any(name.startswith("first_stage_model.") for name in names):
        raise SetupError(f"{path.name} has no VAE. Give a full checkpoint: UNet, text encoder and VAE in one file.")
    return family


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    """Name -> entry of each tensor of a safetensors file."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
    except (ValueError, struct.error):
        raise SetupError(
            f"{path.name} is not a safetensors file. Older formats can run code when they are loaded; "
            "convert it, or give another file."
        ) from None
    header.pop("__metadata__", None)
    return dict(header)
