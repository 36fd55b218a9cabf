"""The approximation of GELU by tanh with one exponential: 0.5 x (1 + tanh(u)) = x sigmoid(2 u), exactly.

Over the hidden layer of a transformer a kernel with tanh computes for longer than it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ....torch_facts.private_names import computation_dtype

OPERATOR = torch.ops.aten.gelu.default


def by_approximation(elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The operator: by a sigmoid where tanh is asked for. elsewhere: computes the exact GELU."""

    def gelu(x: torch.Tensor, approximate: str = "none") -> Any:
        return by_sigmoid(x) if approximate == "tanh" else elsewhere(x, approximate=approximate)

    return gelu


def by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    exact = x.to(computation_dtype(x.dtype))
    doubled = 2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact * exact * exact)
    return (exact * torch.sigmoid(doubled)).to(x.dtype)
