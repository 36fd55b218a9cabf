"""Weight casts from fp8 as an opaque operator, for NVIDIA GPUs before Ada (RTX 40), where Triton lacks fp8 types.

PyTorch's own kernel does the cast. No fusion is lost: the following product reads the cast weight from memory anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....torch_compat.gpu import is_nvidia
from ....torch_compat.operators import defined

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FIRST_WITH_FP8 = (8, 9)
_CAST, _DEQUANTIZE = "aten::_to_copy", "comfy_kitchen::dequantize_fp8"


def keep_opaque(graph: torch.fx.Graph, device: torch.device) -> None:
    """Replace each cast from fp8 by the operator, if the device needs it. Also move the transpose of a weight behind
    comfy-kitchen's operator that casts and scales: inductor would copy a transposed fp8 weight in its own kernel.
    """
    if not _lacks_fp8(device):
        return
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name == _DEQUANTIZE:
            _transpose_behind(graph, node)
        if schema is None or schema.name != _CAST or node.args[0].meta["val"].dtype not in _FP8:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(operator(), (node.args[0], node.meta["val"].dtype))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _transpose_behind(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    turned, aten = node.args[0], torch.ops.aten
    if isinstance(turned, torch.fx.Node) and turned.target is aten.clone.default:
        turned = turned.args[0]
    if not isinstance(turned, torch.fx.Node) or turned.target is not aten.t.default:
        return
    with graph.inserting_before(node):
        whole = graph.call_function(node.target, (turned.args[0], *node.args[1:]))  # type: ignore[arg-type]
        made = graph.call_function(aten.t.default, (whole,))
    whole.meta = {**node.meta, "val": node.meta["val"].t().contiguous()}
    made.meta = {**node.meta, "val": whole.meta["val"].t()}
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
