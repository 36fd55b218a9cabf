"""Compares every mapped ATen operator with torch on the CPU. A missing OneFlow kernel would end this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_cache.backends.oneflow.operators import MAPPED

from .rig import TOLERANCE, on_oneflow, random, relative_error

X, Y = random(2, 4, 6, 5), random(2, 4, 6, 5, seed=1)
POSITIVE = X.abs() + 0.5
ROWS, MORE = random(3, 4, 8), random(3, 8, 5, seed=2)
MASK = random(2, 4, 6, 6, seed=3)
aten = torch.ops.aten
# Operators with a case that are decomposed.
DECOMPOSED = {f"aten.{name}" for name in (
    "copy.default", "matmul.default", "rms_norm.default", "baddbmm.default", "scaled_dot_product_attention.default",
)}  # fmt: skip

# (operator, function that uses it, tensors); an operator may have several functions.
CASES: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    *[(name, getattr(torch, name), (X,)) for name in ("cos", "neg", "relu", "sigmoid", "sin", "tanh")],
    *[(name, getattr(torch, name), (POSITIVE,)) for name in ("rsqrt", "sqrt")],
    ("add.Tensor", lambda x, y: torch.add(x, y, alpha=0.5) + 2, (X, Y)),
    ("sub.Tensor", lambda x, y: torch.sub(x, y, alpha=3) - 1.5, (X, Y)),
    ("mul.Tensor", lambda x, y: x * y * 0.25, (X, Y)),
    ("div.Tensor", lambda x, y: x / y / 3, (X, POSITIVE)),
    ("pow.Tensor_Scalar", lambda x: x**2 + x**0.5, (POSITIVE,)),
    ("mean.dim", lambda x: x.mean(dim=(2, 3), keepdim=True) + x.mean(1, keepdim=True), (X,)),
    ("sum.dim_IntList", lambda x: x.sum(dim=1), (X,)),
    ("clamp.default", lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0), (X,)),
    ("where.self", lambda x, y: aten.where.self(torch.tensor([[True], [False]] * 3), x, y), (X, Y)),
    ("silu.default", F.silu, (X,)),
    ("gelu.default", F.gelu, (X,)),
    ("gelu.default", lambda x: F.gelu(x, approximate="tanh"), (X,)),
    ("_softmax.default", lambda x: x.softmax(-1) + x.softmax(1), (X * 20,)),
    ("linear.default", lambda x, w: F.linear(x, w), (X, random(7, 5))),
    ("linear.default", lambda x, w, b: F.linear(x, w, b), (X, random(7, 5), random(7))),
    ("bmm.default", torch.bmm, (ROWS, MORE)),
    ("matmul.default", lambda x, y: x @ y.transpose(-1, -2), (X, Y)),
    ("baddbmm.default", lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2), (random(3, 4, 5), ROWS, MORE)),
    ("scaled_dot_product_attention.default", F.scaled_dot_product_attention, (X, Y, POSITIVE)),
    (
        "scaled_dot_product_attention.default",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3),
        (X, Y, POSITIVE, MASK),
    ),
    (
        "scaled_dot_product_attention.default",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril()),
        (X, Y, POSITIVE),
    ),
    ("convolution.default", lambda x, w, b: F.conv2d(x, w, b, padding=1), (X, random(3, 4, 3, 3), random(3))),
    ("convolution.default", lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=1), (X, random(3, 4, 3, 3))),
    ("convolution.default", lambda x, w: F.conv2d(x, w, groups=2), (X, random(6, 2, 1, 1))),
    ("group_norm.default", lambda x, w, b: F.group_norm(x, 2, w, b), (X * 5 + 3, random(4), random(4, seed=1))),
    ("group_norm.default", lambda x: F.group_norm(x, 4, eps=1e-2), (X,)),
    ("layer_norm.default", lambda x, w, b: F.layer_norm(x, (5,), w, b), (X * 5 + 3, random(5), random(5, seed=1))),
    ("layer_norm.default", lambda x: F.layer_norm(x, (6, 5)), (X,)),
    ("convolution.default", lambda x, w: F.conv3d(x, w, padding=1), (random(1, 2, 3, 4, 5), random(3, 2, 3, 3, 3))),
    ("rms_norm.default", lambda x, w: F.rms_norm(x, (5,), w, 1e-6), (X, random(5))),
    ("index_select.default", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), (X,)),
    ("index_select.default", lambda x: F.interpolate(x, size=(11, 10), mode="nearest"), (X,)),
    ("index_select.default", lambda x: F.interpolate(x, size=(45, 23), mode="nearest"), (X,)),
    ("constant_pad_nd.default", lambda x: aten.constant_pad_nd(x, [1, 2, 0, 1], 0.5), (X,)),
    ("view.default", lambda x: x.view(2, 24, 5) * 2, (X,)),
    ("permute.default", lambda x: x.permute(0, 2, 3, 1) * 2, (X,)),
    ("unsqueeze.default", lambda x: x.unsqueeze(-1) * 2, (X,)),
    ("squeeze.dims", lambda x: x[:, :1].squeeze(1) * 2, (X,)),
    ("expand.default", lambda x: x[:, :1].expand(-1, 4, -1, -1) * 2, (X,)),
    ("repeat.default", lambda x: x.repeat(1, 2, 1, 1), (X,)),
    ("cat.default", lambda x, y: torch.cat([x, y], dim=1), (X, Y)),
    ("split_with_sizes.default", lambda x: x.split([1, 4], dim=3)[1] * 2, (X,)),
    ("select.int", lambda x: x[:, -1] * 2, (X,)),
    ("slice.Tensor", lambda x: x[:, 1:-1, ::2, -3:] * 2, (X,)),
    ("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y[:, 1:3], 1, 1, 3), (X, Y)),
    ("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, 1, 0, 4), (X, Y)),
    ("_to_copy.default", lambda x: aten._to_copy(x, dtype=torch.float64), (X,)),
    ("copy.default", lambda x, y: aten.copy(x, y[:1, :1]), (X, Y)),
]


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


@pytest.mark.parametrize(("name", "function", "tensors"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_an_operator_gives_torchs_result(
    name: str, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]
) -> None:
    module = Function(function)
    assert relative_error(on_oneflow(module, tensors, tensors), function(*tensors)) <= TOLERANCE


def test_every_mapped_operator_has_a_case_or_returns_its_input() -> None:
    covered = {f"aten.{name}" if "." in name else f"aten.{name}.default" for name, _, _ in CASES}
    alike = {"aten.add.Scalar", "aten.alias.default", "aten.clone.default"}
    assert set(MAPPED) == (covered | alike) - DECOMPOSED
