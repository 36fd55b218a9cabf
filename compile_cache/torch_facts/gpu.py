"""Which maker's GPU a device is: torch calls an AMD GPU "cuda" too."""

from __future__ import annotations

import torch


def is_nvidia(device: str | torch.device) -> bool:
    """True for "cuda" in a torch that was built for NVIDIA, whether there is such a GPU or not."""
    return torch.device(device).type == "cuda" and torch.version.hip is None
