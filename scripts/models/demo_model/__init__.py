"""A node pack with a small trained model that draws coloured shapes at named positions, for the demo and benchmarks.

Not part of the release. Commit 12c8ffa has the code that trained it (``benchmarks/train_demo_model.py``), training.json
has its losses.
"""

from __future__ import annotations

from typing import Any


class ResoluteDemoModel:
    """Loads the demo model; has the outputs of Load Checkpoint."""

    CATEGORY = "resolute/demo"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def load(self) -> tuple[Any, Any, Any]:
        """MODEL, CLIP for captions of shapes (see captions.py), VAE."""
        from . import networks  # import here, because it needs ComfyUI

        return networks.load_model(), networks.load_clip(), networks.load_vae()


NODE_CLASS_MAPPINGS = {"ResoluteDemoModel": ResoluteDemoModel}
