"""A trace that goes on beside other threads changes nothing for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.compile import one_thread
from compile_cache.backends.inductor.compile.tracing import trace

from ....rig import TOKENS, original, tokens


@torch.compile(backend="eager")
def compiled_by_another_pack(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def looked_at_beside(look: Any) -> list[Any]:
    """Run `look` in another thread while a trace stands in the middle of a block. Returns its result or its error."""
    seen: list[Any] = []

    def looking() -> None:
        try:
            seen.append(look())
        except Exception as error:  # noqa: BLE001 (a test compares it)
            seen.append(error)

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=looking)
            thread.start()
            thread.join()
            return x * 2

    with torch.no_grad():
        trace(original, Block(), [tokens()], (TOKENS,), {"b": 17, "n": 17})
    return seen


def test_a_compiled_function_runs() -> None:
    x = torch.ones(3)
    compiled_by_another_pack(x)
    (seen,) = looked_at_beside(lambda: compiled_by_another_pack(x))
    assert torch.equal(seen, x + 1)


def test_modules_are_called_as_ever() -> None:
    before = torch.nn.Module.__call__, torch.nn.Module.__getattr__
    assert looked_at_beside(lambda: (torch.nn.Module.__call__, torch.nn.Module.__getattr__)) == [before]


def test_another_thread_traces_as_ever() -> None:
    (graph,) = looked_at_beside(lambda: torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))).graph)
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]


def attended(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x, x, x)[0]
    return result


@pytest.mark.parametrize(
    ("function", "module"), [(original, torch.nn.Linear(4, 4)), (attended, torch.nn.MultiheadAttention(4, 2))]
)
def test_the_graph_is_torchs(monkeypatch: pytest.MonkeyPatch, function: Any, module: torch.nn.Module) -> None:
    def traced() -> str:
        with torch.no_grad():
            return trace(function, module.eval(), [tokens()], (TOKENS,), {"b": 17, "n": 17}).graph.code

    ours = traced()
    torchs = make_fx  # called by itself, it goes torch's own way
    monkeypatch.setattr(
        one_thread, "graph_of", lambda function, fakes: torchs(function, tracing_mode="symbolic")(*fakes)
    )
    assert traced() == ours
