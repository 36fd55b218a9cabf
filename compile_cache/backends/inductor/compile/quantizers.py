"""comfy-kitchen's elementwise quantizers as arithmetic, which inductor fuses into the norm, gate or activation before.

As an operator, a quantizer reads all of its input from memory and writes all of its result. Fused, only the result is
written. Each computes what comfy-kitchen's CUDA kernel does: in float32, whatever the dtype of its input. (Its kernel
for the CPU computes in that dtype, and so is further from float32.)

Products stay operators. So do quantizers that rotate or scale blocks: nothing that inductor fuses comes near them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FLOATS_OF_8_BITS = {5: torch.float8_e4m3fn, 6: torch.float8_e5m2}  # by comfy-kitchen's numbers of dtypes
_ONES = torch.ops.aten.ones.default
_LARGEST_INT8 = 127
_LEAST_SCALE = 1e-30


def share_scales(graph: torch.fx.Graph) -> None:
    """Let all quantizers and products of a block take one scale of one. Each would fill one of its own on the GPU."""
    first: dict[str, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not _ONES or node.args[0] or any(map(_may_write, node.users)):
            continue
        shared = first.setdefault(repr(node.kwargs), node)
        if shared is not node:
            node.replace_all_uses_with(shared)
            graph.erase_node(node)


def _may_write(node: torch.fx.Node) -> bool:
    """It writes to its input, or gives a view of it that may be written to."""
    is_mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    return bool(is_mutable or getattr(node.target, "is_view", False))


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor, output_dtype_code: int) -> torch.Tensor:
    """x divided by a scale for all of it, in 8 bits; what is too large becomes the largest number."""
    dtype = _FLOATS_OF_8_BITS[output_dtype_code]
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def quantize_int8_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x of shape (..., n) as integers, and the scale of each row in float32, of shape (..., 1)."""
    scale = (x.abs().amax(-1, keepdim=True).float() / _LARGEST_INT8).clamp(min=_LEAST_SCALE)
    return (x.float() / scale).round().clamp(-_LARGEST_INT8 - 1, _LARGEST_INT8).to(torch.int8), scale


BY_NAME: dict[str, Callable[..., Any]] = {
    "quantize_fp8": quantize_fp8,
    "quantize_int8_rowwise": quantize_int8_rowwise,
}
