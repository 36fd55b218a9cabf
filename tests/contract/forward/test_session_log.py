"""The log of a sampling run holds nothing of the model that it is about."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_the_open_log_of_a_controlnet_keeps_no_weights(adapter: Callable[[str], ModuleType], comfy: None) -> None:
    forward, session = adapter("forward.compiled_forward"), adapter("forward.session_log")
    request = adapter("process.compile_request").CompileRequest
    network = Network()
    role = forward.Role.CONTROLNET
    compiled = forward.CompiledForward(network, network.forward, request.resolved("eager", "cpu", role))
    try:
        compiled(torch.ones(1, 4, 2, 2))
        assert len(session._open) == 1  # no model's run ends it
        weight = weakref.ref(network.scale)
        record = weakref.ref(adapter("process.runtime").record_of(network))
        del network, compiled
        adapter("process.runtime").cache()
        gc.collect()
        adapter("process.runtime").cache()  # drops what belongs to collected modules
        gc.collect()
        assert (weight(), record()) == (None, None)
        assert session._open[0]._structure() == ""
    finally:
        session._open.clear()
