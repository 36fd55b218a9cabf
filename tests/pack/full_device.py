"""DynamicVRAM on a GPU that has no memory left, on the CPU: every block asks for its weights in each step.

Tests in ComfyUI's process load this file alone, so it imports nothing of the pack.
"""

from __future__ import annotations

from typing import Any

import torch

_PAGE = 32 << 20


class FullReservation:
    """A `ModelVBAR` of comfy-aimdo on a device without memory: no page ever comes."""

    device = 0
    base_addr = _PAGE
    offset = 0

    def alloc(self, size: int) -> tuple[Any, int, int]:
        self.offset = -(-self.offset // 512) * 512
        self.offset += size
        return self, self.base_addr + self.offset - size, size

    def fault(self, address: int, size: int) -> None:
        return None

    def get_residency(self) -> list[int]:
        return [0] * (-(-self.offset // _PAGE))

    def loaded_size(self) -> int:
        return 0

    def free_memory(self, size: int) -> int:
        return 0

    def prioritize(self) -> None: ...


def page(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Give each matrix of the module an allocation. Returns the modules that have one, with their names."""
    reservation, found = FullReservation(), {}
    for name, part in module.named_modules():
        weight = part._parameters.get("weight")
        if weight is not None and weight.ndim == 2:
            part.__dict__["_v"] = reservation.alloc(weight.nbytes)
            found[part] = name
    return found
