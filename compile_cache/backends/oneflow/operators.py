"""The ATen operators that `lowering` keeps, each as a function of OneFlow tensors that takes the operator's arguments.

Torch decomposes all other operators into these; the set covers ComfyUI's models. All shapes are known, because a graph
belongs to one signature, and a view is a copy. OneFlow 0.9.0 lacks some CPU kernels; the functions here compose those
from other operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .packages import oneflow

Operator = Callable[..., Any]
MAPPED: dict[str, Operator] = {}

# Operators with the same name and meaning in OneFlow.
_SAME = ("bmm", "cos", "neg", "permute", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh", "unsqueeze")
# Operators that return their input unchanged.
_IDENTITIES = ("alias", "clone")


def maps(*names: str) -> Callable[[Operator], Operator]:
    """Register the decorated function for these operators; `names` omit the prefix "aten."."""

    def declare(function: Operator) -> Operator:
        MAPPED.update({f"aten.{name}": function for name in names})
        return function

    return declare


def _same(name: str) -> Operator:
    return lambda *arguments: getattr(oneflow(), name)(*arguments)


MAPPED.update({f"aten.{name}.default": _same(name) for name in _SAME})
MAPPED.update({f"aten.{name}.default": lambda x, **_: x for name in _IDENTITIES})


# --- arithmetic ------------------------------------------------------------------------------------------------------


maps("add.Tensor", "add.Scalar")(lambda x, y, alpha=1: x + (y if alpha == 1 else y * alpha))
maps("sub.Tensor")(lambda x, y, alpha=1: x - (y if alpha == 1 else y * alpha))
maps("mul.Tensor")(lambda x, y: x * y)
maps("div.Tensor")(lambda x, y: x / y)
maps("pow.Tensor_Scalar")(lambda x, exponent: oneflow().pow(x, exponent))
maps("clamp.default")(lambda x, min=None, max=None: oneflow().clamp(x, min=min, max=max))
maps("where.self")(lambda condition, x, y: oneflow().where(condition, x, y))
maps("_to_copy.default")(lambda x, *, dtype=None, **_: _cast(x, dtype))


@maps("mean.dim")
def _mean(x: Any, dim: Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    return oneflow().mean(_cast(x, dtype), dim=list(dim), keepdim=keepdim)


@maps("sum.dim_IntList")
def _sum(x: Any, dim: Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    return oneflow().sum(_cast(x, dtype), dim=list(dim), keepdim=keepdim)


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Cast a OneFlow tensor to a torch dtype, unless that is None. Raises AttributeError if OneFlow lacks the dtype."""
    return x if dtype is None else x.to(getattr(oneflow(), str(dtype).removeprefix("torch.")))


# --- activations, products and norms ---------------------------------------------------------------------------------


maps("gelu.default")(lambda x, approximate="none": oneflow().nn.functional.gelu(x, approximate=approximate))
# The third argument is True only for a cast from half to float, which no model of one dtype requests.
maps("_softmax.default")(lambda x, dim, half_to_float: oneflow().nn.functional.softmax(x, dim=dim))
maps("linear.default")(lambda x, weight, bias=None: oneflow().nn.functional.linear(x, weight, bias))


@maps("convolution.default")
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if transposed:
        raise NotImplementedError("a transposed convolution")
    convolve = getattr(oneflow().nn.functional, f"conv{len(stride)}d")
    return convolve(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)  # it refuses lists


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


# --- sizes and views -------------------------------------------------------------------------------------------------


@maps("constant_pad_nd.default")
def _pad(x: Any, pad: Sequence[int], value: float = 0) -> Any:
    return oneflow().nn.functional.pad(x, list(pad), mode="constant", value=value)


maps("expand.default")(lambda x, size, implicit=False: x if tuple(x.shape) == tuple(size) else x.expand(*size))
maps("repeat.default")(lambda x, repeats: x.repeat(*repeats))
maps("cat.default")(lambda tensors, dim=0: oneflow().cat(list(tensors), dim=dim))
maps("split_with_sizes.default")(lambda x, sizes, dim=0: oneflow().split(x, list(sizes), dim))
maps("index_select.default")(lambda x, dim, index: oneflow().index_select(x, dim, index))
maps("select.int")(lambda x, dim, index: oneflow().select(x, dim % len(x.shape), index % x.shape[dim]))


@maps("view.default")
def _view(x: Any, shape: Sequence[int]) -> Any:
    return x if tuple(x.shape) == tuple(shape) else oneflow().reshape(x, list(shape))


@maps("squeeze.dims")
def _squeeze(x: Any, dims: Sequence[int]) -> Any:
    dropped = {dim % len(x.shape) for dim in dims}
    return oneflow().reshape(x, [size for dim, size in enumerate(x.shape) if dim not in dropped or size != 1])


@maps("slice.Tensor")
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim %= len(x.shape)
    whole = slice(*slice(start, end, step).indices(x.shape[dim]))
    if (whole.start, whole.stop, whole.step) == (0, x.shape[dim], 1):
        return x
    return x[tuple(whole if index == dim else slice(None) for index in range(len(x.shape)))]


@maps("slice_scatter.default")
def _slice_scatter(
    x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        raise NotImplementedError("writing into a slice with a step")
    dim %= len(x.shape)
    first, last, _ = slice(start, end).indices(x.shape[dim])
    parts = [_slice(x, dim, 0, first), source, _slice(x, dim, last, x.shape[dim])]
    present = [part for part, size in zip(parts, (first, last - first, x.shape[dim] - last), strict=True) if size]
    return oneflow().cat(present, dim=dim) if len(present) > 1 else present[0]
