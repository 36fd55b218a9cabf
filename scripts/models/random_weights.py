"""Writes random weights in fp16 as a safetensors file.

Matrices get variance-preserving noise (std = fan_in ** -0.5), norms 1, biases 0: other noise overflows fp16 within a
few layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Write ``path``; the same seed gives the same file on the same kind of device."""
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    save_file({name: _tensor(name, shape, generator).cpu() for name, shape in shapes.items()}, path)


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    if len(shape) < 2:
        constant = 0.0 if name.endswith("bias") else 1.0
        return torch.full(shape, constant, dtype=torch.float16, device=device)
    # Uniform noise with the same deviation is twice as fast as normal noise on a CPU.
    bound = math.sqrt(3.0) * _deviation(name, shape)
    noise = torch.empty(shape, dtype=torch.float32, device=device)
    return noise.uniform_(-bound, bound, generator=generator).to(torch.float16)


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    fan_in = math.prod(shape[1:])
    if "position" in name or "token_embedding" in name:
        return 0.5  # embedding rows are looked up, not multiplied; the sum of two has a deviation of about 1
    return 1 / math.sqrt(fan_in)
