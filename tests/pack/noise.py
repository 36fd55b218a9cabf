"""Random weights that keep a signal's variance, so that deep random models stay finite."""

from __future__ import annotations

import math

import torch


def fill(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """A float32 state dict: matrices with std = fan_in ** -0.5, norms 1, biases 0."""
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = {}
    for name, tensor in module.state_dict().items():
        if tensor.ndim >= 2:
            fan_in = math.prod(tensor.shape[1:])
            weights[name] = torch.randn(tensor.shape, generator=generator) * fan_in**-0.5
        elif name.endswith("bias"):
            weights[name] = torch.zeros(tensor.shape)
        else:
            weights[name] = torch.ones(tensor.shape)
    return weights
