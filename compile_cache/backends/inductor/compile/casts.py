"""Casts of weights from fp8 as an operator, for NVIDIA cards before Ada (RTX 40), on which Triton has no such types.

PyTorch's own kernel casts there. Nothing is lost: a product after it takes the cast weight from memory in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....torch_facts.gpu import is_nvidia
from ....torch_facts.operators import defined

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FIRST_WITH_FP8 = (8, 9)
_CAST, _DEQUANTIZE = "aten::_to_copy", "comfy_kitchen::dequantize_fp8"


def keep_opaque(graph: torch.fx.Graph, device: torch.device) -> None:
    """Put the operator in place of each cast from fp8, if the device needs it. comfy-kitchen's, which casts and scales,
    gets a weight before it is transposed: inductor would copy it so in a kernel of its own.
    """
    if not _lacks_fp8(device):
        return
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        turned = node.args[0] if schema is not None and schema.name == _DEQUANTIZE else None
        if isinstance(turned, torch.fx.Node) and turned.target is torch.ops.aten.t.default:
            with graph.inserting_before(node):
                whole = graph.call_function(node.target, (turned.args[0], *node.args[1:]))
                made = graph.call_function(turned.target, (whole,))
            made.meta, whole.meta = dict(node.meta), {**node.meta, "val": node.meta["val"].t()}
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            continue
        if schema is None or schema.name != _CAST or node.args[0].meta["val"].dtype not in _FP8:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(operator(), (node.args[0], node.meta["val"].dtype))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


@functools.cache
def operator() -> Callable[..., torch.Tensor]:
    """`torch.ops.resolute.cast_from_fp8`."""
    return defined(
        "cast_from_fp8",
        "(Tensor x, ScalarType dtype) -> Tensor",
        lambda x, dtype: x.to(dtype),
        lambda x, dtype: torch.empty_like(x, dtype=dtype),
    )


def _lacks_fp8(device: torch.device) -> bool:
    return is_nvidia(device) and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8
