"""A node that says what the process holds."""

from __future__ import annotations

import gc
import json
from typing import Any

import torch

from .node import Node


class ResoluteTestHeld(Node):
    """Counts the modules in memory, and the bytes of all tensors, each storage once."""

    FUNCTION = "count"
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS = {"seed": ("INT", {"default": 0})}

    def count(self, seed: int) -> dict[str, Any]:
        gc.collect()
        held = gc.get_objects()
        storages = [
            each.untyped_storage() for each in held if issubclass(type(each), torch.Tensor) and not each.is_meta
        ]
        found = {
            "bytes": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
            "modules": sum(issubclass(type(each), torch.nn.Module) for each in held),
        }
        return {"ui": {"text": [json.dumps(found)]}}
