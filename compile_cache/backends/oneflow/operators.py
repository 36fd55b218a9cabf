"""Maps each ATen operator to a function with the operator's arguments that takes and returns OneFlow tensors.

All shapes are known, because a graph belongs to one signature. OneFlow 0.9.0 lacks scaled_dot_product_attention,
movedim, unflatten and some CPU kernels; the functions build those from other operators.
"""

from __future__ import annotations

from . import math_operators, shape_operators  # noqa: F401 (importing them fills the table)
from .operator_table import MAPPED

__all__ = ["MAPPED"]
