"""The table of mapped operators, and what its entries share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .packages import oneflow

Operator = Callable[..., Any]
MAPPED: dict[str, Operator] = {}


def maps(*names: str) -> Callable[[Operator], Operator]:
    """Declares the decorated function as the meaning of these operators, without their "aten."."""

    def declare(function: Operator) -> Operator:
        MAPPED.update({f"aten.{name}": function for name in names})
        return function

    return declare


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """`x` in a dtype of torch. Raises AttributeError for one that OneFlow does not have."""
    return x if dtype is None else x.to(getattr(oneflow(), str(dtype).removeprefix("torch.")))
