"""A small trained model, and the node that loads it into ComfyUI: shapes, colours and places on demand.

A node pack of the demo and of benchmarks; it never ships. ``benchmarks/train_demo_model.py`` made the two files.
"""

from __future__ import annotations

from typing import Any


class ResoluteDemoModel:
    """In place of Load Checkpoint: the same three outputs."""

    CATEGORY = "resolute/demo"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def load(self) -> tuple[Any, Any, Any]:
        """MODEL, CLIP for captions of shapes (see captions.py), VAE."""
        from . import networks  # only here is ComfyUI certain to be importable

        return networks.load_model(), networks.load_clip(), networks.load_vae()


NODE_CLASS_MAPPINGS = {"ResoluteDemoModel": ResoluteDemoModel}
