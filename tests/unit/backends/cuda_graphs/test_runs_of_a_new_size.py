"""Count the forwards that a new size costs: one that answers the call, one that is recorded, and no launch."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.base import CaptureFacts
from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs import memory


class Graph:
    """A CUDA graph that counts its launches."""

    launches = 0

    def capture_begin(self, **_: Any) -> None: ...
    def capture_end(self) -> None: ...

    def raw_cuda_graph_exec(self) -> int:
        return 1

    def replay(self) -> None:
        Graph.launches += 1


class Driver:
    """The driver's function that maps the memory of a graph."""

    def __init__(self, answer: int) -> None:
        self.answer, self.uploads = answer, 0

    def cuGraphUpload(self, program: Any, stream: Any) -> int:
        self.uploads += 1
        return self.answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
    cuda = SimpleNamespace(
        CUDAGraph=Graph, current_stream=lambda device=None: stream, stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device: None, mem_get_info=lambda device: (0, 0), is_available=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(capturing, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    monkeypatch.setattr(memory, "torch", SimpleNamespace(cuda=cuda))
    pools = SimpleNamespace(stream=lambda device: stream, pool=lambda device: (1, 0), opened=lambda device, grown: None)
    monkeypatch.setattr(capturing.pools, "shared", pools)
    monkeypatch.setattr(capturing, "make_room", lambda *given: None)
    monkeypatch.setattr(capturing, "cost_of_run", lambda device: contextlib.nullcontext(capturing_cost()))
    monkeypatch.setattr(capturing, "waits_of", lambda run: (run(), [])[1])
    driver = Driver(0)
    monkeypatch.setattr(memory, "_driver", lambda: driver)
    monkeypatch.setattr(Graph, "launches", 0)
    return driver


def capturing_cost() -> Any:
    return SimpleNamespace(bytes=1, host_share=lambda: 1.0, seconds=lambda: 0.0)


class Runs:
    """A forward that counts, and the calls of it."""

    def __init__(self) -> None:
        self.count = 0
        self.recorder = capturing.Recorder()

    def invoke(self, tensors: Any) -> torch.Tensor:
        self.count += 1
        return torch.as_tensor(tensors[0]) * 2

    def answer(self, size: int) -> int:
        """Answer a call of a size that has no capture, as the cache does. Returns how often the forward ran."""
        before, given = self.count, [torch.ones(size)]
        signature = SimpleNamespace(tensors=(("x", None),), values=())
        key = SimpleNamespace(signature=signature)
        call = SimpleNamespace(key=key, invoke=self.invoke, tensors=given, module=torch.nn.Module())
        self.recorder.capture(call, self.invoke(given), CaptureFacts(0, 1 << 30, 0, 1.0, 0.0))  # type: ignore[arg-type]
        return self.count - before


def test_only_the_first_size_is_rehearsed_and_no_graph_is_launched(driver: Driver) -> None:
    runs = Runs()
    assert [runs.answer(size) for size in (4, 5, 6)] == [3, 2, 2]
    assert (driver.uploads, Graph.launches) == (3, 0)


def test_where_the_driver_cannot_map_memory_each_graph_is_launched_once(driver: Driver) -> None:
    driver.answer = 801  # not supported
    runs = Runs()
    assert [runs.answer(size) for size in (4, 5)] == [3, 2]
    assert Graph.launches == 2
