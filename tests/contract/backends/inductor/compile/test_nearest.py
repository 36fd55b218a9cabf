"""Upsampling by whole numbers of pixels in a trace: torch's own results, by indices without a division in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.backends.inductor.compile.nearest import ByIndex

from ....rig import random

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def maps(*shape: int) -> torch.Tensor:
    return random(*shape).contiguous(memory_format=FORMATS[len(shape)])


def upsampled(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, **options)


def traced(x: torch.Tensor, options: dict[str, Any]) -> torch.fx.GraphModule:
    def function(x: torch.Tensor) -> torch.Tensor:
        with ByIndex():
            return upsampled(x, **options)

    graph: torch.fx.GraphModule = make_fx(function, tracing_mode="symbolic")(x)
    return graph


def divides(graph: torch.fx.GraphModule) -> bool:
    """By sizes in floating point, as torch's own does."""
    return "sym_float" in str(graph.graph)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    ("shape", "factor"),
    [((2, 3, 5, 7), 2.0), ((1, 8, 4, 6), (2, 3)), ((2, 4, 3, 5, 7), 2), ((1, 4, 1, 6, 5), (1.0, 2.0, 2.0))],
    ids=str,
)
def test_every_place_has_what_torch_puts_there(shape: tuple[int, ...], factor: Any, mode: str) -> None:
    options = {"scale_factor": factor, "mode": mode}
    graph = traced(maps(*shape), options)
    assert not divides(graph)
    larger = maps(*shape[:2], *(size if size == 1 else size + 3 for size in shape[2:]))
    for x in (maps(*shape), larger):
        result = graph(x)
        assert torch.equal(result, upsampled(x, **options))
        assert result.is_contiguous(memory_format=FORMATS[x.ndim])


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 1.5},
        {"scale_factor": 0.5},
        {"size": (10, 14)},
        {"scale_factor": 2.0, "mode": "bilinear", "align_corners": False},
        {"scale_factor": 2.0, "recompute_scale_factor": True},
    ],
    ids=str,
)
def test_what_is_something_else_stays_torchs_own(options: dict[str, Any]) -> None:
    x = maps(1, 3, 5, 7)
    own = make_fx(lambda x: upsampled(x, **options), tracing_mode="symbolic")(x)
    assert str(traced(x, options).graph) == str(own.graph)


def test_a_map_by_channels_stays_torchs_own() -> None:
    assert divides(traced(random(1, 3, 5, 7), {"scale_factor": 2.0}))


@pytest.mark.parametrize("by", ["position", "name"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_evenly_spaced_numbers_are_traced_for_every_number_of_steps(by: str, dtype: torch.dtype | None) -> None:
    def numbers(x: torch.Tensor) -> torch.Tensor:
        more = (x.shape[0],) if by == "position" else ()
        return torch.linspace(0.25, -16.0, *more, **({"steps": x.shape[0]} if by == "name" else {}), dtype=dtype)

    def function(x: torch.Tensor) -> torch.Tensor:
        with ByIndex():
            return numbers(x)

    graph = make_fx(function, tracing_mode="symbolic")(torch.zeros(6))
    for steps in (1, 2, 3, 6, 7, 100, 1001):
        expected = numbers(torch.zeros(steps))
        torch.testing.assert_close(graph(torch.zeros(steps)), expected, rtol=1e-6, atol=1e-6)
