"""Inputs that are made up, where the real ones are not there yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dummy_input(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, memory_format: torch.memory_format
) -> torch.Tensor:
    """Normal noise, or zeros of a type that is not floating. The same each time, and the global generator, which the
    user's pictures may depend on, does not notice.
    """
    made = torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=memory_format)
    if not dtype.is_floating_point:
        return made.zero_()
    return made.normal_(generator=torch.Generator(device).manual_seed(0))
