"""Random inputs, for when the real ones do not exist yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dummy_input(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, memory_format: torch.memory_format
) -> torch.Tensor:
    """Normal noise in a floating dtype, zeros in any other.

    The same values each time, from a generator of its own: images may depend on torch's global one.
    """
    made = torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=memory_format)
    if not dtype.is_floating_point:
        return made.zero_()
    return made.normal_(generator=torch.Generator(device).manual_seed(0))
