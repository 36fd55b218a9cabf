"""The base of this pack's nodes."""

from __future__ import annotations

from typing import Any

SEED = ("INT", {"default": 0, "min": 0, "max": 2**31})


def whole(default: int = 1, least: int = 1, most: int = 4096) -> tuple[str, dict[str, int]]:
    """An input for an integer."""
    return ("INT", {"default": default, "min": least, "max": most})


class Node:
    """A V1 node, so that it works on every supported ComfyUI. INPUTS: the required ones."""

    CATEGORY = "resolute/test"
    RETURN_TYPES: tuple[str, ...] = ("MODEL",)
    INPUTS: dict[str, Any]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": cls.INPUTS}
