"""ATen's arithmetic, activations, matrix products, convolutions and norms in OneFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .operator_table import MAPPED, Operator, cast, maps
from .packages import oneflow

# Operators with the same name and meaning in OneFlow.
_SAME = (
    "abs", "cos", "erf", "exp", "log", "matmul", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "tanh",
)  # fmt: skip


def _same(name: str) -> Operator:
    return lambda x, *arguments: getattr(oneflow(), name)(x, *arguments)


MAPPED.update({f"aten.{name}.default": _same(name) for name in _SAME})


# --- arithmetic ------------------------------------------------------------------------------------------------------


maps("add.Tensor", "add.Scalar")(lambda x, y, alpha=1: x + _scaled(y, alpha))
maps("sub.Tensor", "sub.Scalar")(lambda x, y, alpha=1: x - _scaled(y, alpha))
maps("rsub.Scalar", "rsub.Tensor")(lambda x, y, alpha=1: y - _scaled(x, alpha))
maps("mul.Tensor", "mul.Scalar")(lambda x, y: x * y)
maps("div.Tensor", "div.Scalar")(lambda x, y: x / y)
maps("pow.Tensor_Scalar", "pow.Tensor_Tensor")(lambda x, exponent: oneflow().pow(x, exponent))


@maps("mean.dim")
def _mean(x: Any, dim: Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    return oneflow().mean(cast(x, dtype), dim=list(dim), keepdim=keepdim)


@maps("sum.dim_IntList")
def _sum(x: Any, dim: Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    return oneflow().sum(cast(x, dtype), dim=list(dim), keepdim=keepdim)


maps("clamp.default")(lambda x, min=None, max=None: oneflow().clamp(x, min=min, max=max))
maps("where.self")(lambda condition, x, y: oneflow().where(condition, x, y))


# --- activations -----------------------------------------------------------------------------------------------------


maps("silu.default")(lambda x: oneflow().nn.functional.silu(x))


@maps("gelu.default")
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + oneflow().tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    return oneflow().nn.functional.gelu(x)


@maps("softmax.int", "_softmax.default")
def _softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    # The third argument of `_softmax` is the flag half_to_float, which is False if a model runs in one dtype.
    return oneflow().nn.functional.softmax(cast(x, dtype if isinstance(dtype, torch.dtype) else None), dim=dim)


# --- products --------------------------------------------------------------------------------------------------------


maps("linear.default")(lambda x, weight, bias=None: oneflow().nn.functional.linear(x, weight, bias))


@maps("addmm.default")
def _addmm(bias: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Any:
    return _scaled(oneflow().matmul(x, y), alpha) + _scaled(bias, beta)


maps("mm.default", "bmm.default")(lambda x, y: oneflow().matmul(x, y))


@maps("baddbmm.default")
def _baddbmm(bias: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Any:
    product = _scaled(oneflow().bmm(x, y), alpha)
    # With beta 0 torch ignores the first input, even NaN: it is usually uninitialised memory.
    return product if beta == 0 else product + _scaled(bias, beta)


@maps("scaled_dot_product_attention.default")
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    flow = oneflow()
    if dropout_p or is_causal or enable_gqa:
        raise NotImplementedError("attention with dropout, a causal mask or grouped heads")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    *lead, tokens, _ = query.shape
    flat = [part.reshape(math.prod(lead), *part.shape[-2:]) for part in (query * scale, key, value)]
    scores = flow.bmm(flat[0], flat[1].transpose(1, 2))
    if attn_mask is not None:
        scores = scores.reshape(*lead, tokens, key.shape[-2])
        if attn_mask.dtype == flow.bool:
            scores = flow.masked_fill(scores, flow.logical_not(attn_mask).expand(*scores.shape), float("-inf"))
        else:
            scores = scores + attn_mask
        scores = scores.reshape(-1, tokens, key.shape[-2])
    weighted = flow.bmm(flow.nn.functional.softmax(scores, dim=-1), flat[2])
    return weighted.reshape(*lead, tokens, value.shape[-1])


@maps("conv2d.default")
def _conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    if isinstance(padding, str):
        raise NotImplementedError(f"a convolution with padding '{padding}'")
    # OneFlow requires tuples, not lists.
    pair = [tuple(part) if isinstance(part, (list, tuple)) else (part, part) for part in (stride, padding, dilation)]
    return oneflow().nn.functional.conv2d(x, weight, bias, pair[0], pair[1], pair[2], groups)


# --- normalisation ---------------------------------------------------------------------------------------------------


@maps("group_norm.default")
def _group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    flow = oneflow()
    if x.is_cuda:
        return flow._C.group_norm(x, weight, bias, weight is not None, num_groups, eps)
    rows = _normalized(x.reshape(x.shape[0], num_groups, -1), [2], eps).reshape(*x.shape)
    per_channel = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    rows = rows if weight is None else rows * weight.reshape(*per_channel)
    return rows if bias is None else rows + bias.reshape(*per_channel)


@maps("layer_norm.default")
def _layer_norm(
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    axis = len(x.shape) - len(normalized_shape)
    if x.is_cuda and weight is not None and bias is not None:
        axes = {"begin_norm_axis": axis, "begin_params_axis": axis}
        return oneflow()._C.layer_norm_affine(x, weight, bias, **axes, epsilon=eps)
    result = _normalized(x, list(range(axis, len(x.shape))), eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _normalized(x: Any, dims: list[int], eps: float) -> Any:
    """Normalize to mean 0 and variance 1. On the CPU, OneFlow lacks group norm, and its layer norm ends the process."""
    flow = oneflow()
    centred = x - flow.mean(x, dim=dims, keepdim=True)
    return centred * flow.rsqrt(flow.mean(centred * centred, dim=dims, keepdim=True) + eps)


@maps("rms_norm.default")
def _rms_norm(x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    dims = list(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    result = x * oneflow().rsqrt(oneflow().mean(x * x, dim=dims, keepdim=True) + eps)
    return result if weight is None else result * weight


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1 else x * factor
