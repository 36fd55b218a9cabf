"""A trace and a compile beside other threads of the process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.cards import description
from compile_cache.backends.inductor.lower import environment, one_thread
from compile_cache.backends.inductor.lower.tracing import trace

from .....programs import run_python
from ....rig import TOKENS, original, tokens
from ..described import needs_descriptions

# A trace that goes on beside other threads changes nothing for them.


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


# Inductor's settings, read while another pack's torch.compile has them changed for itself.


def digest() -> str:
    return environment.environment_of(torch.device("cpu"), "").digest()


@contextmanager
def another_pack_compiles() -> Iterator[threading.Event]:
    """As torch.compile does it in another thread: torch's lock, and changed settings until the event is set."""
    started, end = threading.Event(), threading.Event()

    def compile_something() -> None:
        with compile_lock, inductor_config.patch(max_autotune=not inductor_config.max_autotune):
            started.set()
            assert end.wait(60)

    thread = threading.Thread(target=compile_something)
    thread.start()
    try:
        assert started.wait(60)
        yield end
    finally:
        end.set()
        thread.join()


def test_the_settings_are_those_from_before_the_compile() -> None:
    before = digest()
    with another_pack_compiles():
        assert [digest() for _ in range(20)] == [before] * 20
    assert digest() == before


def test_a_first_reader_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = digest(), list[str]()
    monkeypatch.setattr(environment, "_latest", None)
    with another_pack_compiles() as end:
        reader = threading.Thread(target=lambda: found.append(digest()))
        reader.start()
        reader.join(0.5)
        assert found == [], "it read the settings of a compile"
        end.set()
        reader.join(60)
    assert found == [before]


# Inductor starts no workers of its own: they import torch for ten seconds beside a prompt, and nothing needs them.


# Prints how many pools there are after a compile of a kernel of Triton's, and after a load.
COMPILE_AND_LOAD = """
import json, sys
import torch
from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
from compile_cache.backends.inductor.compiler import described_gpu
described_gpu.install_fake_gpu(json.loads(sys.argv[1]))
from compile_cache.backends.inductor.lower import artifacts, lowering
from compile_cache.backends.inductor.lower.tracing import bind_dims, trace

with torch._subclasses.FakeTensorMode():
    x = torch.empty(2, 64, 256, dtype=torch.half, device="cuda:0")
block, dims = torch.nn.RMSNorm(256).to("meta", torch.half), [("batch", "tokens", None)]
made = lowering.compile_trace(trace(lambda block, x: block(x), block, [x], dims, bind_dims(dims, [x.shape])))
print(AsyncCompile.process_pool.cache_info().currsize)
stored = artifacts.pack("key", "label", made)
torch._inductor.codecache.PyCodeCache.cache_clear()
CompiledTritonKernels.cache_clear()
assert artifacts.unpack(stored).kernels
print(AsyncCompile.process_pool.cache_info().currsize)
assert torch._inductor.config.decide_compile_threads() == 4
"""


@needs_descriptions
def test_inductor_starts_no_workers(tmp_path: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    card = json.dumps(description("sm_90"))
    printed = run_python(COMPILE_AND_LOAD, card, TORCHINDUCTOR_COMPILE_THREADS="4", **variables)
    assert printed.split() == ["0", "0"]
