"""What captures do to a device: its stream, its memory, and whether they gain anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import nn

from compile_cache.backends.base import CaptureFacts
from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs import memory, pools
from compile_cache.backends.cuda_graphs.kernel_memory import claim, has_int8_products, has_quantized, largest_product
from compile_cache.errors import CaptureError, NoGainError
from compile_cache.tuning.stopwatch import RunCost, cost_of_run

# Captures touch the devices that they are on, and leave the stream of captures in order.


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


# The product that makes comfy-kitchen allocate as much memory for a stream as it ever needs.


SUMS = 128 * 256 * 4  # bytes of one tile


def needed(rows: int, columns: int, depth: int, multiprocessors: int) -> int:
    """Bytes of sums, as comfy-kitchen 0.2.31 computes them for its largest tiles; 0 where it takes others."""
    if rows * columns <= 4_193_792 or rows * depth <= columns * 5_675:
        return 0
    tiles = -(-rows // 128) * -(-columns // 256)
    rest = tiles % multiprocessors
    split = 0 if rest == 0 else tiles if tiles < multiprocessors else multiprocessors + rest
    return SUMS * min(split * (depth // 64) // 2, multiprocessors)


@pytest.mark.parametrize("multiprocessors", [8, 16, 20, 30, 46, 76, 84, 108, 128, 132, 148, 170, 188])
def test_no_product_needs_more_than_the_one_that_is_claimed(multiprocessors: int) -> None:
    shape = largest_product(multiprocessors)
    assert needed(*shape, multiprocessors) == SUMS * multiprocessors
    assert shape[0] * shape[1] * 2 < 50e6, "bytes of its result, for a moment"


def test_only_modules_with_quantized_weights_have_such_products() -> None:
    module = nn.Linear(16, 16)
    assert not has_quantized(module)
    assert not has_quantized(None)
    for layout, as_int8 in (("TensorCoreFP8Layout", False), ("TensorWiseINT8Layout", True)):
        made = QuantizedTensor.from_float(torch.ones(16, 16), layout)
        module.weight = nn.Parameter(made, requires_grad=False)
        assert has_quantized(nn.Sequential(module))
        assert has_int8_products(nn.Sequential(module)) is as_int8


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU with seven multiprocessors, whose tensors are on the CPU."""
    zeros, ones = torch.zeros, torch.ones
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **kinds: zeros(*sizes, **kinds))
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 7}))
    claim.cache_clear()
    yield
    claim.cache_clear()


def test_it_is_claimed_once_for_a_device(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    product = torch.ops.comfy_kitchen.int8_linear
    monkeypatch.setattr(
        torch.ops.comfy_kitchen, "int8_linear", lambda *given: computed.append(product(*given)), raising=False
    )
    for _ in range(2):
        claim(0)
    assert [tuple(each.shape) for each in computed] == [(largest_product(7)[0], 256)]


@pytest.mark.parametrize(
    ("error", "raised"), [(torch.OutOfMemoryError("full"), True), (RuntimeError("no int8"), False)]
)
def test_a_card_without_the_product_claims_nothing(
    device: None, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: bool
) -> None:
    def fails(*given: object) -> None:
        raise error

    monkeypatch.setattr(torch.ops.comfy_kitchen, "int8_linear", fails, raising=False)
    with pytest.raises(type(error)) if raised else nullcontext():
        claim(0)


# Whether a capture gains anything: the host's share of a run, and what it decides.


class Watch:
    """A stopwatch that says how long the GPU took."""

    def __init__(self, seconds: float) -> None:
        self.measured = seconds

    def seconds(self, wait: bool) -> float | None:
        assert wait, "the time is not known before the GPU is there"
        return self.measured


@pytest.mark.parametrize(("host", "device", "share"), [(0.02, 0.08, 0.25), (0.02, 0.02, 1.0), (0.03, 0.02, 1.5)])
def test_the_hosts_share_of_the_gpus_time(host: float, device: float, share: float) -> None:
    cost = RunCost(host_seconds=host, watch=Watch(device))  # type: ignore[arg-type]
    assert cost.host_share() == pytest.approx(share)


def test_on_the_cpu_nothing_is_measured_and_nothing_is_refused() -> None:
    with cost_of_run("cpu") as cost:
        torch.ones(1000)
    assert (cost.bytes, cost.host_seconds, cost.host_share()) == (0, 0.0, 1.0)


def test_a_call_that_the_gpu_limits_is_refused_before_anything_is_copied_or_recorded() -> None:
    with pytest.raises(NoGainError, match="25% of the time"):
        capturing.capture(lambda tensors: None, [], None, CaptureFacts(host_share=0.25, least_host_share=0.5))
