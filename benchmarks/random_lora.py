"""Random LoRAs for a checkpoint's UNet."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

RANK = 8


def write_lora(checkpoint: Path, out: Path, seed: int) -> None:
    """Write a random LoRA of rank RANK for attention projections and residual blocks, unless the file exists."""
    if out.is_file():
        return
    noise, tensors = torch.Generator().manual_seed(seed), {}
    prefix = "model.diffusion_model."
    with safe_open(checkpoint, "pt") as file:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            if not key.startswith(prefix) or not key.endswith((".to_q.weight", ".to_out.0.weight", ".2.weight")):
                continue
            shape = file.get_slice(key).get_shape()
            name, fan_in = key.removeprefix(prefix).removesuffix(".weight"), torch.Size(shape[1:]).numel()
            if len(shape) < 2:
                continue
            down = torch.randn((RANK, *shape[1:]), generator=noise) / fan_in**0.5
            up = torch.randn((shape[0], RANK, *[1] * (len(shape) - 2)), generator=noise) * 0.05
            tensors[f"diffusion_model.{name}.lora_down.weight"] = down.half()
            tensors[f"diffusion_model.{name}.lora_up.weight"] = up.half()
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out)
