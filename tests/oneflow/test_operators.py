"""Compares every mapped ATen operator with torch on the CPU. A missing OneFlow kernel would end this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_cache.backends.oneflow import lowering
from compile_cache.backends.oneflow.operators import MAPPED
from compile_cache.backends.oneflow.packages import oneflow
from compile_cache.backends.oneflow.runtime import synchronize
from compile_cache.backends.oneflow.weights import SharedWeights, to_oneflow

from .rig import TOLERANCE, random, relative_error

X, Y = random(2, 4, 6, 5), random(2, 4, 6, 5, seed=1)
POSITIVE = X.abs() + 0.5
ROWS, MORE = random(3, 4, 8), random(3, 8, 5, seed=2)
MASK = random(2, 4, 6, 6, seed=3)
aten = torch.ops.aten

# (operator, function that uses it, tensors); an operator may have several functions.
CASES: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    *[
        (name, getattr(torch, name), (X,))
        for name in ("abs", "cos", "erf", "exp", "neg", "relu", "sigmoid", "sin", "tanh")
    ],
    *[(name, getattr(torch, name), (POSITIVE,)) for name in ("log", "reciprocal", "rsqrt", "sqrt")],
    ("add.Tensor", lambda x, y: torch.add(x, y, alpha=0.5) + 2, (X, Y)),
    ("sub.Tensor", lambda x, y: torch.sub(x, y, alpha=3) - 1.5, (X, Y)),
    ("rsub.Scalar", lambda x: torch.rsub(x, 2.0), (X,)),
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
    ("softmax.int", lambda x: x.softmax(-1) + x.softmax(1), (X * 20,)),
    ("linear.default", lambda x, w: F.linear(x, w), (X, random(7, 5))),
    ("linear.default", lambda x, w, b: F.linear(x, w, b), (X, random(7, 5), random(7))),
    ("addmm.default", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (random(5), ROWS[0], MORE[0])),
    ("mm.default", torch.mm, (ROWS[0], MORE[0])),
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
    ("conv2d.default", lambda x, w, b: F.conv2d(x, w, b, padding=1), (X, random(3, 4, 3, 3), random(3))),
    ("conv2d.default", lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=1), (X, random(3, 4, 3, 3))),
    ("conv2d.default", lambda x, w: F.conv2d(x, w, groups=2), (X, random(6, 2, 1, 1))),
    ("group_norm.default", lambda x, w, b: F.group_norm(x, 2, w, b), (X * 5 + 3, random(4), random(4, seed=1))),
    ("group_norm.default", lambda x: F.group_norm(x, 4, eps=1e-2), (X,)),
    ("layer_norm.default", lambda x, w, b: F.layer_norm(x, (5,), w, b), (X * 5 + 3, random(5), random(5, seed=1))),
    ("layer_norm.default", lambda x: F.layer_norm(x, (6, 5)), (X,)),
    ("rms_norm.default", lambda x, w: F.rms_norm(x, (5,), w, 1e-6), (X, random(5))),
    ("upsample_nearest2d.vec", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), (X,)),
    ("upsample_nearest2d.vec", lambda x: F.interpolate(x, size=(11, 10), mode="nearest"), (X,)),
    ("upsample_nearest2d.vec", lambda x: F.interpolate(x, size=(45, 23), mode="nearest"), (X,)),
    ("constant_pad_nd.default", lambda x: aten.constant_pad_nd(x, [1, 2, 0, 1], 0.5), (X,)),
    ("pad.default", lambda x: F.pad(x, (0, 1, 0, 1)), (X,)),
    ("avg_pool2d.default", lambda x: F.avg_pool2d(x, 2, 2), (X,)),
    ("view.default", lambda x: x.view(2, 24, 5) * 2, (X,)),
    ("reshape.default", lambda x: x.transpose(1, 2).reshape(2, -1), (X,)),
    ("flatten.using_ints", lambda x: x.flatten(2) * 2, (X,)),
    ("unflatten.int", lambda x: x.unflatten(1, (2, 2)) * 2, (X,)),
    ("permute.default", lambda x: x.permute(0, 2, 3, 1) * 2, (X,)),
    ("movedim.int", lambda x: x.movedim(1, -1) * 2, (X,)),
    ("transpose.int", lambda x: x.transpose(-1, -2) * 2, (X,)),
    ("t.default", lambda x: x.t() * 2, (ROWS[0],)),
    ("unsqueeze.default", lambda x: x.unsqueeze(-1) * 2, (X,)),
    ("squeeze.dim", lambda x: x[:, :1].squeeze(1) * 2, (X,)),
    ("expand.default", lambda x: x[:, :1].expand(-1, 4, -1, -1) * 2, (X,)),
    ("repeat.default", lambda x: x.repeat(1, 2, 1, 1), (X,)),
    ("cat.default", lambda x, y: torch.cat([x, y], dim=1), (X, Y)),
    ("stack.default", lambda x, y: torch.stack([x, y], dim=1), (X, Y)),
    ("split.Tensor", lambda x: x.split(3, dim=2)[1] * 2, (X,)),
    ("split_with_sizes.default", lambda x: x.split([1, 4], dim=3)[1] * 2, (X,)),
    ("chunk.default", lambda x: x.chunk(2, dim=1)[1] * 2, (X,)),
    ("unbind.int", lambda x: x.unbind(1)[2] * 2, (X,)),
    ("select.int", lambda x: x[:, -1] * 2, (X,)),
    ("slice.Tensor", lambda x: x[:, 1:-1, ::2, -3:] * 2, (X,)),
    ("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y[:, 1:3], 1, 1, 3), (X, Y)),
    ("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, 1, 0, 4), (X, Y)),
    ("_to_copy.default", lambda x: aten._to_copy(x, dtype=torch.float64), (X,)),
    ("to.dtype", lambda x: x.to(torch.float64), (X,)),
    ("type_as.default", lambda x, y: x.type_as(y) + y, (X.double(), Y)),
    ("copy.default", lambda x, y: aten.copy(x, y[:1, :1]), (X, Y)),
    ("zeros_like.default", lambda x: torch.zeros_like(x) + x, (X,)),
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
    expected = function(*tensors)
    module = Function(function)
    lowered = lowering.lower(module, lambda given: function(*given), tensors)
    forward = lowering.LoweredForward(lowered, SharedWeights().get_or_make([], module))
    with oneflow().no_grad():
        (result,) = forward.run([to_oneflow(tensor) for tensor in forward.inputs(tensors)])
        synchronize()
    assert relative_error(oneflow().utils.tensor.to_torch(result), expected) <= TOLERANCE


def test_every_mapped_operator_has_a_case_or_returns_its_input() -> None:
    # Export replaces these, or they share a function with an operator that has a case.
    covered = {f"aten.{name}" if "." in name else f"aten.{name}.default" for name, _, _ in CASES} | {
        "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Tensor", "aten.mul.Scalar", "aten.div.Scalar",
        "aten.pow.Tensor_Tensor", "aten._softmax.default", "aten._unsafe_view.default", "aten.squeeze.dims",
        "aten.to.dtype_layout", "aten.empty_like.default",
    }  # fmt: skip
    passing = {f"aten.{name}" for name in (
        "alias.default", "clone.default", "contiguous.default", "detach.default", "detach_.default", "dropout.default",
        "lift_fresh_copy.default",
    )}  # fmt: skip
    assert set(MAPPED) == covered | passing
