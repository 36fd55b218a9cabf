"""Blocks that stream, on a machine whose streams only keep time: what crosses the bus while the GPU computes.

Core's own functions load each block: two streams in turn, each with a buffer. The bus carries one copy at a time, the
GPU runs one block at a time, and the host launches everything at once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import full_device

BLOCKS, LINEARS, WIDTH = 12, 3, 16
DEVICE = torch.device("cpu")


class Engine:
    """Does one thing at a time. spans: start and end of each."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def run(self, stream: Stream, seconds: float) -> tuple[float, float]:
        start = max(stream.ready, self.spans[-1][1] if self.spans else 0.0)
        stream.ready = start + seconds
        self.spans.append((start, stream.ready))
        return self.spans[-1]


class Stream:
    """ready: when everything that was launched on it is done."""

    def __init__(self) -> None:
        self.ready = 0.0

    def wait_stream(self, other: Stream) -> None:
        self.ready = max(self.ready, other.ready)

    def as_context(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Machine:
    """A copy of all bytes of a block takes `copy` seconds, computing it `compute`."""

    def __init__(self, core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, copy: float, compute: float) -> None:
        self.bus, self.gpu, self.current = Engine(), Engine(), Stream()
        self._copy, self._compute = copy, compute
        self.copies: list[tuple[Any, tuple[float, float]]] = []  # by stream, and so by buffer
        self.computed: list[tuple[float, float]] = []
        self.bytes = 0
        management: Any = importlib.import_module("comfy.model_management")
        aimdo: Any = importlib.import_module("comfy_aimdo.torch")
        loading = core.ours("dynamic_vram.page_loading")
        streams = {DEVICE: [Stream(), Stream()]}
        buffers: dict[Any, Any] = {}

        def buffer_of(stream: Any, device: Any) -> Any:
            return buffers.setdefault(stream, SimpleNamespace(get=lambda size, offset: size, size=lambda: 0))

        def copied(tensors: Any, into: torch.Tensor, non_blocking: bool, stream: Any, r2: Any) -> None:
            self.copies.append((stream, self.bus.run(stream, self._copy / LINEARS)))

        monkeypatch.setattr(management, "NUM_STREAMS", 2)
        monkeypatch.setattr(management, "STREAMS", streams)
        monkeypatch.setattr(management, "stream_counters", {})
        monkeypatch.setattr(management, "current_stream", lambda device: self.current)
        monkeypatch.setattr(management, "get_aimdo_cast_buffer", buffer_of)
        monkeypatch.setattr(management, "cast_to_gathered", copied)
        monkeypatch.setattr(aimdo, "aimdo_to_tensor", lambda at, device: torch.zeros(at, dtype=torch.uint8))
        pinned: Any = importlib.import_module("comfy.pinned_memory")
        monkeypatch.setattr(pinned, "get_pin", lambda module, subset="weights": None)
        monkeypatch.setattr(pinned, "pin_memory", lambda *given, **named: None)
        self.loaded = loading.loaded

    def run(self, site: Any, *tensors: torch.Tensor, lend: Any = None) -> torch.Tensor:
        with lend() if lend is not None else contextlib.nullcontext():
            self.computed.append(self.gpu.run(self.current, self._compute))
        return tensors[0]

    def step(self, core: SimpleNamespace) -> float:
        """The seconds of a step whose blocks all stream."""
        ops: Any = importlib.import_module("comfy.ops")
        weights = core.ours("dynamic_vram.paged_weights").PagedWeights(lambda *given: None)
        blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(ops.disable_weight_init.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS))
            for _ in range(BLOCKS)
        )
        for module in full_device().page(blocks):
            module.__dict__["_v_signature"] = None
        weights.survey(blocks.modules())
        streamed = core.ours("dynamic_vram.streamed_blocks").streamed(self.run, weights)
        site_of = core.ours("dynamic_vram.streamed_blocks").RegionSite
        for number, block in enumerate(blocks):
            streamed(site_of(str(number), "Block", block, lambda module, x: x, (("n",),)), torch.ones(1))
        self.bytes = weights.counters.streamed_bytes
        return self.current.ready


@pytest.fixture
def machine(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float], Machine]]:
    yield lambda copy, compute: Machine(core, monkeypatch, copy, compute)


def overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


@pytest.mark.parametrize(("copy", "compute"), [(3.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
def test_a_step_takes_what_the_slower_of_bus_and_gpu_takes(
    core: SimpleNamespace, machine: Callable[[float, float], Machine], copy: float, compute: float
) -> None:
    busy = machine(copy, compute)
    seconds = busy.step(core)
    assert busy.bytes == BLOCKS * LINEARS * WIDTH * WIDTH * 4
    assert len(busy.copies) == BLOCKS * LINEARS
    # Only the first copy and the last block have nothing beside them.
    assert seconds == pytest.approx(BLOCKS * max(copy, compute) + min(copy, compute))
    assert overlap(busy.bus.spans, busy.gpu.spans) == pytest.approx((BLOCKS - 1) * min(copy, compute))


def test_no_copy_begins_while_a_block_reads_the_same_buffer(
    core: SimpleNamespace, machine: Callable[[float, float], Machine]
) -> None:
    busy = machine(1.0, 3.0)
    busy.step(core)
    streams = list(dict.fromkeys(stream for stream, _ in busy.copies))
    assert len(streams) == 2
    for number in range(2, BLOCKS):
        copies = busy.copies[number * LINEARS : (number + 1) * LINEARS]
        assert {stream for stream, _ in copies} == {busy.copies[(number - 2) * LINEARS][0]}
        assert min(start for _, (start, _) in copies) >= busy.computed[number - 2][1]
