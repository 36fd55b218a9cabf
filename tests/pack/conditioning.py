"""Conditioning without a text encoder."""

from __future__ import annotations

from typing import Any

import torch

from .node import SEED, Node, whole


class ResoluteTestConditioning(Node):
    """Random embeddings of a given length and width, like a text encoder's."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    INPUTS = {
        "seed": SEED,
        "tokens": whole(77),
        "width": whole(768, 1, 32768),
        "pooled_width": whole(0, 0, 8192),
        "batch": whole(1, 1, 64),
    }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {**super().INPUT_TYPES(), "optional": {"padding": whole(0, 0)}}

    def make(
        self, seed: int, tokens: int, width: int, pooled_width: int, batch: int, padding: int = 0
    ) -> tuple[list[Any]]:
        """Shapes: (batch, tokens, width), and (batch, pooled_width) unless that is 0. padding: tokens at the end that a
        mask leaves out; without any there is no mask.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        embedding = torch.randn((batch, tokens, width), generator=generator)
        extra = {}
        if pooled_width:
            extra["pooled_output"] = torch.randn((batch, pooled_width), generator=generator)
        if padding:
            extra["attention_mask"] = (torch.arange(tokens) < tokens - padding).long().expand(batch, -1)
        return ([[embedding, extra]],)
