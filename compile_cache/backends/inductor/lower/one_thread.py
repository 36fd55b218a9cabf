"""Trace without side effects on other threads.

While torch.fx traces, it replaces `Module.__call__` and `Module.__getattr__` for the whole process, which slows down
the prompt's calls, and sets a process-wide "is tracing" flag, which makes functions of torch.compile raise.
`make_fx` needs neither: its tracer calls modules normally.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ....torch_compat.private_names import PythonKeyTracer, make_fx

_this_thread = threading.local()


def graph_of(function: Callable[..., Any], fakes: list[Any]) -> torch.fx.GraphModule:
    """The ATen graph of a function over symbolic fake tensors. Raises the function's and torch's errors."""
    _replace_trace()
    _this_thread.traces_for_us = True
    try:
        traced: torch.fx.GraphModule = make_fx(function, tracing_mode="symbolic")(*fakes)
    finally:
        _this_thread.traces_for_us = False
    return traced


@functools.cache
def _replace_trace() -> None:
    """Patch `PythonKeyTracer.trace` once per process. Other threads and nested traces still use torch's own method."""
    if PythonKeyTracer is None:
        return
    torchs = PythonKeyTracer.trace

    def trace(tracer: Any, root: Any, concrete_args: Any = None) -> torch.fx.Graph:
        graph: torch.fx.Graph
        if not getattr(_this_thread, "traces_for_us", False):
            graph = torchs(tracer, root, concrete_args)
            return graph
        _this_thread.traces_for_us = False  # a trace within it is not ours
        tracer.root, tracer.tensor_attrs = torch.nn.Module(), {}
        graph = tracer.graph = torch.fx.Graph(tracer_cls=type(tracer))
        function, given = tracer.create_args_for_root(root, False, concrete_args)
        tracer.create_node("output", "output", (tracer.create_arg(function(*given)),), {})
        return graph

    PythonKeyTracer.trace = trace
