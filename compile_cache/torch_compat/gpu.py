"""The vendor of a device's GPU: torch calls an AMD GPU "cuda" too."""

from __future__ import annotations

import torch


def is_nvidia(device: str | torch.device) -> bool:
    """True for "cuda" in a torch that was built for NVIDIA, even if there is no such GPU."""
    return torch.device(device).type == "cuda" and torch.version.hip is None
