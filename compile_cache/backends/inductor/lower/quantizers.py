"""comfy-kitchen's elementwise quantizers as arithmetic, which inductor fuses with the norm, gate or activation before.

As an opaque operator, a quantizer reads its whole input from memory and writes its whole result. Fused, it only writes
the result. Each one computes in float32 for any input dtype, like comfy-kitchen's CUDA kernel. (comfy-kitchen's CPU
kernel computes in the input dtype, and so is further from float32.)

Products stay operators. So do quantizers that rotate or scale blocks: inductor's fused code is much slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FLOATS_OF_8_BITS = {5: torch.float8_e4m3fn, 6: torch.float8_e5m2}  # by comfy-kitchen's dtype numbers
_ONES = torch.ops.aten.ones.default
_LARGEST_INT8 = 127
_LEAST_SCALE = 1e-30


def share_scales(graph: torch.fx.Graph) -> None:
    """Let all quantizers and products of a block share one constant scale of 1: each would fill its own on the GPU."""
    first: dict[str, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not _ONES or node.args[0] or any(map(_may_write, node.users)):
            continue
        shared = first.setdefault(repr(node.kwargs), node)
        if shared is not node:
            node.replace_all_uses_with(shared)
            graph.erase_node(node)


def _may_write(node: torch.fx.Node) -> bool:
    """True if the node writes to its input, or returns a view through which another node may write."""
    is_mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    return bool(is_mutable or getattr(node.target, "is_view", False))


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor, output_dtype_code: int) -> torch.Tensor:
    """x divided by one scale for the whole tensor, as 8-bit floats, clamped to the largest finite value."""
    dtype = _FLOATS_OF_8_BITS[output_dtype_code]
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def quantize_int8_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x of shape (..., n) as int8, and the float32 scale of each row, of shape (..., 1)."""
    scale = (x.abs().amax(-1, keepdim=True).float() / _LARGEST_INT8).clamp(min=_LEAST_SCALE)
    return (x.float() / scale).round().clamp(-_LARGEST_INT8 - 1, _LARGEST_INT8).to(torch.int8), scale


BY_NAME: dict[str, Callable[..., Any]] = {
    "quantize_fp8": quantize_fp8,
    "quantize_int8_rowwise": quantize_int8_rowwise,
}
