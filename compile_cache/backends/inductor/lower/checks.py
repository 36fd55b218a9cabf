"""Checks of a traced graph, and queries of the weights that it uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....torch_compat.private_names import OpOverload
from . import kitchen

_REPEATABLE_WRITES = ("aten::clamp", "aten::clamp_")  # idempotent


def refuse_writes_to_inputs(graph: torch.fx.Graph) -> None:
    """Raises ValueError if the graph writes into an input: we may run code again on the same tensors to compare it. An
    in-place clamp, as in core's product for plain fp8 weights, is idempotent and allowed; see `CompiledRegion.written`.
    """
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        written = node.kwargs.get("out", node.args[0])
        while isinstance(written.target, OpOverload) and written.target.is_view:
            written = written.args[0]
        if written.op == "placeholder" and node.target._schema.name not in _REPEATABLE_WRITES:
            raise ValueError(f"it writes into its input ({node.target})")


def refuse_attention(graph: torch.fx.Graph) -> None:
    """Raises ValueError for attention or a softmax, a part of it: the region's key lacks attention's kernel flags."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and any(part in str(node.target) for part in ("attention", "softmax")):
            raise ValueError(f"it computes attention ({node.target}), and its site says that it does not")


def quantized_weights(graph: torch.fx.Graph, layouts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """See `Trace.quantized`. layouts: the `weight_layouts` of the graph's weight inputs.

    A plain fp8 weight that is cast first does not count as quantized: it only saves memory.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    used = [pair for pair in zip(placeholders, layouts, strict=False) if pair[1] and pair[0].users]
    found = {(layout, kitchen.product_of(node) or "") for node, layout in used}
    return tuple(sorted(pair for pair in found if pair[1] or not pair[0].startswith("float8")))


def drop_unused_weights(graph: torch.fx.Graph, weights: int) -> tuple[int, ...]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"][:weights]
    used = tuple(index for index, node in enumerate(placeholders) if node.users)
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    return used
