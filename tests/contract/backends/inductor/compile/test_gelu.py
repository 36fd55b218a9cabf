"""GELU's approximation by tanh, as a sigmoid: torch's results, and no other GELU is changed."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.compile.decompositions import decompositions
from compile_cache.backends.inductor.compile.gelu import by_sigmoid

from ....rig import random, relative_error

WIDE = torch.linspace(-30, 30, 2001)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
def test_it_is_torchs_own(dtype: torch.dtype, tolerance: float) -> None:
    for x in (WIDE, random(1000)):
        right = torch.nn.functional.gelu(x.double(), approximate="tanh")
        assert relative_error(by_sigmoid(x.to(dtype)).double(), right) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_it_is_as_near_to_the_exact_result(dtype: torch.dtype) -> None:
    x = WIDE.to(dtype)
    right = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torchs = torch.nn.functional.gelu(x, approximate="tanh").double()
    assert relative_error(by_sigmoid(x).double(), right) <= 1.01 * relative_error(torchs, right)
    assert by_sigmoid(x).dtype == dtype


@pytest.mark.parametrize(("approximate", "has_sigmoid"), [("tanh", True), ("none", False)])
def test_only_this_approximation_is_changed(approximate: str, has_sigmoid: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    graph = make_fx(run, decompositions(), tracing_mode="symbolic")(random(3, 5))
    names = " ".join(str(node.target) for node in graph.graph.nodes)
    assert ("sigmoid" in names) is has_sigmoid
    assert torch.allclose(graph(random(4, 7)), run(random(4, 7)), atol=1e-6)
