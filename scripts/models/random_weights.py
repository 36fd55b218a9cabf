"""Writes random weights as fp16 safetensors, tensor by tensor.

Matrices get variance-preserving noise (std = fan_in ** -0.5), norms 1, biases 0:
other noise overflows fp16 within a few layers. This writer holds one tensor in memory
at a time; the safetensors library would hold all 7 GB of SDXL twice.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

BYTES = 2


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Write ``path``; the same seed gives the same file on the same kind of device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    with open(path, "wb") as file:
        file.write(_header(shapes))
        for name, shape in shapes.items():
            file.write(_tensor(name, shape, generator).cpu().numpy().tobytes())


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The format's header: its length, then JSON padded to a multiple of 8 bytes."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + BYTES * math.prod(shape)
        entries[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


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
