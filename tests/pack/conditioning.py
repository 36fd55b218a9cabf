"""Conditioning without a text encoder."""

from __future__ import annotations

from typing import Any

import torch


class ResoluteTestConditioning:
    """Random embeddings of a given length and width, like a text encoder's."""

    CATEGORY = "resolute/test"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**31}),
                "tokens": ("INT", {"default": 77, "min": 1, "max": 4096}),
                "width": ("INT", {"default": 768, "min": 1, "max": 8192}),
                "pooled_width": ("INT", {"default": 0, "min": 0, "max": 8192}),
                "batch": ("INT", {"default": 1, "min": 1, "max": 64}),
            }
        }

    def make(self, seed: int, tokens: int, width: int, pooled_width: int, batch: int) -> tuple[list[Any]]:
        """Shapes: (batch, tokens, width), and (batch, pooled_width) unless that is 0."""
        generator = torch.Generator("cpu").manual_seed(seed)
        embedding = torch.randn((batch, tokens, width), generator=generator)
        extra = {}
        if pooled_width:
            extra["pooled_output"] = torch.randn((batch, pooled_width), generator=generator)
        return ([[embedding, extra]],)
