"""The workspace of comfy-kitchen's int8 matrix product, allocated before a capture.

The product has one workspace per stream, as large as the largest product so far needed. A product that needs more frees
it and allocates a larger one. Inside a capture this breaks the capture ("cuBLAS error: 13"), and a graph captured
before would work in freed memory. So we compute the product with the largest workspace once on the stream of captures,
and the workspace stays: 17 MB on an H200.

Source: comfy-kitchen 0.2.31 (`cutlass_gemm_int8.cu`); newer versions do the same.
"""

from __future__ import annotations

import functools
import logging

import torch

from ...modules.weight_parts import forms_in
from ...torch_compat.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

_AS_INT8 = ("INT8", "Int8", "W4A4")  # substrings of layout names
_TILE = (128, 256)  # rows and columns of the kernel's largest tile
_DEPTH = 256
# With fewer results, or with fewer rows at a depth as large as the columns, the kernel chooses other tiles.
_LEAST_RESULTS = 4_193_793
_LEAST_ROWS = 5_676


def has_quantized(module: torch.nn.Module | None) -> bool:
    """True if the module has weights made of several tensors, so comfy-kitchen may compute its products."""
    return any(form.count > 1 for form in forms_in(module))


def has_int8_products(module: torch.nn.Module | None) -> bool:
    """True if the module has weights that comfy-kitchen may multiply as int8: int8_tensorwise, or 4 bits as int8."""
    return any(word in form.layout for form in forms_in(module) for word in _AS_INT8)


@functools.cache
def claim(device: int) -> None:
    """Make comfy-kitchen allocate its workspace for the current stream, the stream of captures, once per device.

    Raises torch's OutOfMemoryError. Allocates nothing if the product cannot run: then no capture contains it either.
    """
    product = getattr(torch.ops.comfy_kitchen, "int8_linear", None)
    if product is None:
        return
    rows, columns, depth = largest_product(torch.cuda.get_device_properties(device).multi_processor_count)
    with torch.no_grad():
        x = torch.zeros(rows, depth, dtype=torch.bfloat16, device=f"cuda:{device}")
        weight = torch.zeros(columns, depth, dtype=torch.int8, device=x.device)
        try:
            product(x, weight, torch.ones((), device=x.device), None, 2)  # 2: bfloat16
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.debug("Resolute: comfy-kitchen's int8 product cannot run here: %s", error)


def largest_product(multiprocessors: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a product with the largest workspace, on a GPU with this many multiprocessors.

    The kernel splits the tiles of an incomplete wave among all multiprocessors, and each keeps a tile of partial sums.
    So this product has one tile more than a number of full waves.
    """
    rows, columns = _TILE
    waves = 2
    while (waves * multiprocessors + 1) * rows < max(_LEAST_ROWS, _LEAST_RESULTS / columns):
        waves += 1
    return (waves * multiprocessors + 1) * rows, columns, _DEPTH
