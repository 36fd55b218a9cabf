"""All of our operators that a trace or its compiled code may call."""

from __future__ import annotations

import torch

from ....attention import chooser, chosen
from ....modules import own_memory
from . import casts, gelu, kitchen


def register() -> None:
    """Define our operators in this process. Call this before loading another process's trace or compiled code."""
    chooser.operator()
    chosen.operator()
    own_memory.operator()
    kitchen.operators()
    casts.operator()
    gelu.operator()


def prepare(graph: torch.fx.Graph) -> None:
    """Load cuDNN and prepare the attention of a traced graph in a thread, so that its first use does not wait."""
    for node in graph.find_nodes(op="call_function", target=chooser.operator()):
        q, k, v, mask = (*node.args, None)[:4]
        if mask is None and node.kwargs.get("mask") is None:
            chooser.chooser.compile_ahead(*(each.meta["val"] for each in (q, k, v)))
