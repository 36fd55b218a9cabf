"""Two LoRA files that fit every kind of model here, for layers that all of them have with equal shapes."""

from __future__ import annotations

from pathlib import Path

import numpy
from safetensors.numpy import save_file

# In three kinds of regions, and outside all regions.
_LAYERS = {
    "time_embed.0": (128, 32),
    "input_blocks.1.0.in_layers.2": (32, 32, 3, 3),
    "input_blocks.1.0.emb_layers.1": (32, 128),
    "input_blocks.1.1.transformer_blocks.0.attn1.to_q": (32, 32),
    "out.2": (4, 32, 3, 3),
}


def write(folder: Path) -> None:
    """Write fuzz-a.safetensors for all layers and fuzz-b.safetensors for one transformer block, both of rank 2."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, part) in enumerate({"fuzz-a": "", "fuzz-b": "transformer_blocks"}.items()):
        noise = numpy.random.default_rng(number)
        tensors = {}
        for layer, shape in _LAYERS.items():
            if part in layer:
                key, fan_in = f"diffusion_model.{layer}", float(numpy.prod(shape[1:]))
                down = noise.standard_normal((2, *shape[1:])) / fan_in**0.5
                up = noise.standard_normal((shape[0], 2, *[1] * (len(shape) - 2))) * 0.5
                tensors[f"{key}.lora_down.weight"] = down.astype(numpy.float32)
                tensors[f"{key}.lora_up.weight"] = up.astype(numpy.float32)
        save_file(tensors, folder / f"{name}.safetensors")
