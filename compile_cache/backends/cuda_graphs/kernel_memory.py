"""Memory that comfy-kitchen's int8 product keeps for each stream, claimed before a capture.

The product has a buffer for each stream, as large as it needed so far. Where a larger product needs more, it frees the
buffer and allocates another one. Inside a capture that breaks the capture ("cuBLAS error: 13"), and a graph that was
captured before would go on working in freed memory. So the product that needs most is computed once on the stream of
captures, and the buffer stays: 17 MB on an H200.

Read in comfy-kitchen 0.2.31 (`cutlass_gemm_int8.cu`) and in newer versions, which are alike in this.
"""

from __future__ import annotations

import functools
import logging

import torch

from ...regions.weight_parts import forms_in
from ...torch_facts.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

_AS_INT8 = ("INT8", "Int8", "W4A4")  # parts of the names of layouts
_TILE = (128, 256)  # rows and columns of its largest tile
_DEPTH = 256
# With fewer results, or with less than so many rows for a depth as large as the columns, it takes other tiles.
_LEAST_RESULTS = 4_193_793
_LEAST_ROWS = 5_676


def has_quantized(module: torch.nn.Module | None) -> bool:
    """True if the module has weights of several tensors, so its products may be comfy-kitchen's."""
    return any(form.count > 1 for form in forms_in(module))


def has_int8_products(module: torch.nn.Module | None) -> bool:
    """True if the module has weights that comfy-kitchen may multiply as int8: int8_tensorwise, or four bits as int8."""
    return any(word in form.layout for form in forms_in(module) for word in _AS_INT8)


@functools.cache
def claim(device: int) -> None:
    """Make comfy-kitchen allocate its buffer for the current stream, which is that of captures. It does so once.

    Raises torch's OutOfMemoryError. Where the product cannot run, it claims nothing: no capture has it either.
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
    """Rows, columns and depth of a product that needs as much memory as any on a GPU with so many multiprocessors.

    The kernel splits the tiles of an incomplete wave among all multiprocessors, and each keeps a tile of sums. So this
    product has one tile more than full waves have.
    """
    rows, columns = _TILE
    waves = 2
    while (waves * multiprocessors + 1) * rows < max(_LEAST_ROWS, _LEAST_RESULTS / columns):
        waves += 1
    return (waves * multiprocessors + 1) * rows, columns, _DEPTH
