"""Noise levels that answer from the host have the numbers that are on the GPU, and asking them waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile_cache.backends.cuda_graphs.sync_check import recorded_waits

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + 0.1,
    "subtract": lambda a, b: a - b,
    "subtract from a number": lambda a, b: 1.0 - a,
    "multiply": lambda a, b: a * b,
    "multiply by a number": lambda a, b: 0.3 * a,
    "divide": lambda a, b: a / b,
    "divide a number": lambda a, b: 0.7 / a,
    "square": lambda a, b: a**2,
    "root": lambda a, b: a**0.5,
    "sqrt": lambda a, b: (a * a + b).sqrt(),
    "negative": lambda a, b: (-a).abs(),
    "ancestral": lambda a, b: b * (a**2 - b**2).abs() ** 0.5 / (a**2) ** 0.5,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_host_has_the_numbers_of_the_gpu(pack: Callable[[str], Any], operation: Callable[[Any, Any], Any]) -> None:
    values = pack("nodes.adapters.sampling.host_values").HostValues
    generator = torch.Generator().manual_seed(0)
    levels = (torch.rand(4096, generator=generator) * 14.6 + 1e-3).cuda()
    plain = operation(levels[:-1], levels[1:])
    noted = values.of(levels)
    found = operation(noted[:-1], noted[1:])
    assert type(found) is values
    with recorded_waits() as waits:
        numbers = found.tolist()
        assert bool(noted[3] > 0)
        assert float(noted[-1]) == noted[-1].item()
    assert waits == []
    assert numbers == plain.tolist()
    assert torch.equal(found.cpu(), plain.cpu())


def test_a_number_that_was_written_on_the_gpu_is_read_there(pack: Callable[[str], Any]) -> None:
    noted = pack("nodes.adapters.sampling.host_values").HostValues.of(torch.ones(4, device="cuda"))
    noted[2] = 5.0
    assert noted.tolist() == [1.0, 1.0, 5.0, 1.0]
