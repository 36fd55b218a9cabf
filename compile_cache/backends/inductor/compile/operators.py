"""All operators of ours that a trace, or code that was compiled of one, may call."""

from __future__ import annotations

import torch

from ....attention import chooser, chosen
from ....regions import own_memory
from . import casts, gelu, kitchen


def register() -> None:
    """Define them in this process. Do it before a trace or compiled code is loaded that another process made."""
    chooser.operator()
    chosen.operator()
    own_memory.operator()
    kitchen.operators()
    casts.operator()
    gelu.operator()


def prepare(graph: torch.fx.Graph) -> None:
    """Have a thread make ready what the first use of a trace's operators would wait for."""
    for node in graph.find_nodes(op="call_function", target=chooser.operator()):
        q, k, v, mask = (*node.args, None)[:4]
        if mask is None and node.kwargs.get("mask") is None:
            chooser.chooser.compile_ahead(*(each.meta["val"] for each in (q, k, v)))
