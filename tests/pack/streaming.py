"""A model whose weights stream."""

from __future__ import annotations

import sys
from typing import Any

from .full_device import loaded, page
from .node import Node


class ResoluteTestStreams(Node):
    """In front of the compile node."""

    FUNCTION = "stream"
    INPUTS = {"model": ("MODEL",)}

    def stream(self, model: Any) -> tuple[Any]:
        page(model.model.diffusion_model)
        streamed = [each for name, each in sys.modules.items() if name.endswith(".adapters.weights.streamed_blocks")]
        for each in streamed:
            vars(each)["loaded"] = loaded
        assert streamed, "Resolute is not loaded"
        return (model,)
