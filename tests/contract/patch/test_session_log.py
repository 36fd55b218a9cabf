"""The log of a sampling run: what ends it, and that it holds nothing of the model that it is about."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_the_open_log_of_a_controlnet_keeps_no_weights(adapter: Callable[[str], ModuleType], comfy: None) -> None:
    forward, session = adapter("patch.compiled_forward"), adapter("patch.session_log")
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
        assert session._open[0]._facts() == {}
    finally:
        session._open.clear()


def test_each_run_of_a_controlnet_beside_a_model_that_is_not_compiled_is_logged(
    adapter: Callable[[str], ModuleType], comfy: None, caplog: pytest.LogCaptureFixture
) -> None:
    forward, session = adapter("patch.compiled_forward"), adapter("patch.session_log")
    request = adapter("process.compile_request").CompileRequest
    network = Network()
    compiled = forward.CompiledForward(
        network, network.forward, request.resolved("eager", "cpu", forward.Role.CONTROLNET)
    )
    for calls in (3, 2):
        caplog.clear()
        with caplog.at_level("INFO"):
            for _ in range(calls):
                compiled(torch.ones(1, 4, 2, 2))
            compiled.end()  # ComfyUI cleans up each model that it loaded for the run
        assert f"{calls} eager calls" in caplog.text
        assert session._open == []
