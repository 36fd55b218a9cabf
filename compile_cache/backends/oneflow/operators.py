"""What each ATen operator is in OneFlow. The functions take the operator's own arguments, tensors being OneFlow's.

All shapes are known: a graph belongs to one signature. OneFlow 0.9.0 has no scaled_dot_product_attention, no movedim
and no unflatten, and lacks kernels on the CPU; what is missing is put together from what is there.
"""

from __future__ import annotations

from . import math_operators, shape_operators  # noqa: F401 (they fill the table)
from .operator_table import MAPPED

__all__ = ["MAPPED"]
