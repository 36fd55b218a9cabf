"""Captures touch the devices that they are on, and leave the stream of captures in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs import memory, pools
from compile_cache.errors import CaptureError


def test_memory_is_released_on_devices_in_use_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """To synchronize another one makes a CUDA context there."""
    touched: list[tuple[str, int]] = []
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_allocator_backend=lambda: "cudaMallocAsync",
        device_count=lambda: 4, synchronize=lambda device: touched.append(("wait", device)),
    )  # fmt: skip
    monkeypatch.setattr(memory, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None)))
    monkeypatch.setattr(memory, "is_in_use", lambda device: device == 2)
    trim = SimpleNamespace(cuDeviceGraphMemTrim=lambda device: touched.append(("trim", device.value)) or 0)
    monkeypatch.setattr(memory, "_driver", lambda: trim)
    memory.release_graph_memory()
    assert touched == [("wait", 2), ("trim", 2)]


@pytest.mark.parametrize("place", [1, 2])
def test_an_input_that_is_elsewhere_refuses_the_capture(place: int) -> None:
    """`tolist` reads it without a wait, and every replay would have the numbers of the capture."""
    tensors = [torch.empty(4, device="meta") for _ in range(2)]
    tensors.insert(place, torch.tensor([2.0, 3.0]))
    with pytest.raises(CaptureError, match="runs on meta, and an input is on cpu"):
        capturing.capture(lambda given: given[0] * given[place].tolist()[0], tensors, tensors[0])


class Streams:
    """The order of the present stream and that of captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[str] = []
        own, present = (SimpleNamespace(wait_stream=lambda other, name=name: self.waits.append(name)) for name in "cp")

        @contextlib.contextmanager
        def on(stream: Any) -> Iterator[None]:
            assert stream is own
            yield

        cuda = SimpleNamespace(current_stream=lambda device: present, stream=on)
        monkeypatch.setattr(capturing, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
        monkeypatch.setattr(capturing.pools, "shared", SimpleNamespace(stream=lambda device: own))


@pytest.mark.parametrize("error", [CaptureError("it waits for the GPU"), KeyboardInterrupt()])
def test_what_comes_after_a_capture_waits_for_its_stream(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A rehearsal that failed may still run, and writes to memory that the allocator gives to what comes next."""
    streams = Streams(monkeypatch)

    def rehearse(*given: Any) -> Any:
        assert streams.waits == ["c"]
        raise error

    monkeypatch.setattr(capturing, "_rehearse", rehearse)
    monkeypatch.setattr(capturing, "cost_of_run", lambda device: contextlib.nullcontext(SimpleNamespace()))
    with pytest.raises(type(error)):
        capturing.capture(lambda given: given[0], [torch.ones(2)], torch.ones(2))
    assert streams.waits == ["c", "p"]


def test_the_capture_of_an_anchor_ends_on_a_full_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that waits for a stream in a capture would be captured too, so the capture must end."""
    done: list[str] = []

    def full(size: int, device: str) -> torch.Tensor:
        done.append("allocate")
        raise torch.OutOfMemoryError

    graph = SimpleNamespace(capture_begin=lambda **_: done.append("begin"), capture_end=lambda: done.append("end"))
    cuda = SimpleNamespace(
        CUDAGraph=lambda: graph, Stream=lambda device: None, stream=lambda stream: contextlib.nullcontext()
    )
    monkeypatch.setattr(pools, "torch", SimpleNamespace(cuda=cuda, zeros=full))
    shared = pools.Pools()
    for _ in range(2):  # it is tried again
        with pytest.raises(torch.OutOfMemoryError):
            shared.pool(0)
    assert done == ["begin", "allocate", "end"] * 2
