"""The table of mapped operators, and helpers for its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .packages import oneflow

Operator = Callable[..., Any]
MAPPED: dict[str, Operator] = {}


def maps(*names: str) -> Callable[[Operator], Operator]:
    """Register the decorated function for these operators; `names` are without "aten."."""

    def declare(function: Operator) -> Operator:
        MAPPED.update({f"aten.{name}": function for name in names})
        return function

    return declare


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Cast a OneFlow tensor to a torch dtype, unless that is None. Raises AttributeError if OneFlow lacks the dtype."""
    return x if dtype is None else x.to(getattr(oneflow(), str(dtype).removeprefix("torch.")))
