"""Random weights that preserve variance, so that deep random models stay finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


def fill(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """A float32 state dict: matrices with std = fan_in ** -0.5, norms 1, biases 0."""
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = {}
    for name, shape in _shapes(module):
        if len(shape) >= 2:
            weights[name] = torch.randn(shape, generator=generator) * math.prod(shape[1:]) ** -0.5
        else:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return weights


def _shapes(module: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in module.state_dict().items():
        yield name, tuple(tensor.shape)
    for path, part in module.named_modules():
        # If ComfyUI pages weights, its Linear has none until they are loaded; that of its mixed precision never has.
        if getattr(part, "weight", None) is None and hasattr(part, "in_features"):
            yield f"{path}.weight", (part.out_features, part.in_features)
            # Its mixed precision has a bias that is not in the state dict, and is not initialized either.
            if getattr(part, "comfy_need_lazy_init_bias", False) or getattr(part, "bias", None) is not None:
                yield f"{path}.bias", (part.out_features,)
