from typing import Any

import torch

class ModelPatcher:
    cached_patcher_init: Any
    def __init__(
        self, model: torch.nn.Module, load_device: torch.device, offload_device: torch.device, size: int = 0
    ) -> None: ...
    # Most of what a patcher has is read with its own name and its own check where it is used.
    def __getattr__(self, name: str) -> Any: ...
