"""The product that makes comfy-kitchen allocate as much memory for a stream as it ever needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import nn

from compile_cache.backends.cuda_graphs.kernel_memory import (
    claim,
    has_int8_products,
    has_quantized,
    largest_product,
)

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
