"""ATen's resizing, views, copies and dtype casts in OneFlow. In a graph, a view is a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .operator_table import MAPPED, cast, maps
from .packages import oneflow

# Operators that return their input unchanged.
_IDENTITIES = (
    "aten.alias.default", "aten.clone.default", "aten.contiguous.default", "aten.detach.default",
    "aten.detach_.default", "aten.dropout.default", "aten.lift_fresh_copy.default",
)  # fmt: skip
MAPPED.update({name: lambda x, *_, **__: x for name in _IDENTITIES})


# --- sizes -----------------------------------------------------------------------------------------------------------


@maps("upsample_nearest2d.vec")
def _upsample(x: Any, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None) -> Any:
    """Nearest neighbour. Whole factors repeat pixels; other factors select rows and columns by index."""
    height, width = x.shape[2:]
    if output_size is None:
        scale = scale_factors or (1.0, 1.0)
        output_size = (math.floor(height * scale[0]), math.floor(width * scale[1]))
    new_height, new_width = output_size
    if new_height % height == 0 and new_width % width == 0:
        up, across = new_height // height, new_width // width
        tall = x.reshape(*x.shape[:2], height, 1, width, 1).expand(*x.shape[:2], height, up, width, across)
        return tall.reshape(*x.shape[:2], new_height, new_width)
    rows = [math.floor(row * height / new_height) for row in range(new_height)]
    columns = [math.floor(column * width / new_width) for column in range(new_width)]
    return _index_select(_index_select(x, 2, rows), 3, columns)


def _index_select(x: Any, dim: int, indices: Sequence[int]) -> Any:
    flow = oneflow()
    return flow.index_select(x, dim, flow.tensor(list(indices), dtype=flow.int64, device=x.device))


@maps("constant_pad_nd.default")
def _pad(x: Any, pad: Sequence[int], value: float = 0) -> Any:
    return oneflow().nn.functional.pad(x, list(pad), mode="constant", value=value)


@maps("pad.default")
def _pad_mode(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant":
        raise NotImplementedError(f"padding with mode '{mode}'")
    return _pad(x, pad, 0 if value is None else value)


@maps("avg_pool2d.default")
def _avg_pool2d(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *rest: Any) -> Any:
    if rest:
        raise NotImplementedError("average pooling with options other than the defaults")
    return oneflow().nn.functional.avg_pool2d(x, tuple(kernel_size), tuple(stride or kernel_size), padding)


# --- views, which are copies in a graph ------------------------------------------------------------------------------


@maps("view.default", "_unsafe_view.default", "reshape.default")
def _reshape(x: Any, shape: Sequence[int]) -> Any:
    return x if tuple(x.shape) == tuple(shape) else oneflow().reshape(x, list(shape))


maps("flatten.using_ints")(lambda x, start_dim=0, end_dim=-1: oneflow().flatten(x, start_dim, end_dim))


@maps("unflatten.int")
def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= len(x.shape)
    return oneflow().reshape(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


maps("permute.default")(lambda x, dims: oneflow().permute(x, tuple(dims)))


@maps("movedim.int")
def _movedim(x: Any, source: int, destination: int) -> Any:
    rank = len(x.shape)
    order = [dim for dim in range(rank) if dim != source % rank]
    order.insert(destination % rank, source % rank)
    return oneflow().permute(x, tuple(order))


maps("transpose.int")(lambda x, dim0, dim1: oneflow().transpose(x, dim0, dim1))
maps("t.default")(lambda x: oneflow().transpose(x, 0, 1) if len(x.shape) > 1 else x)
maps("unsqueeze.default")(lambda x, dim: oneflow().unsqueeze(x, dim))


@maps("squeeze.dim", "squeeze.dims")
def _squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    rank = len(x.shape)
    dropped = {each % rank for each in ([dim] if isinstance(dim, int) else dim)}
    kept = [size for index, size in enumerate(x.shape) if index not in dropped or size != 1]
    return oneflow().reshape(x, kept)


maps("expand.default")(lambda x, size, implicit=False: x if tuple(x.shape) == tuple(size) else x.expand(*size))
maps("repeat.default")(lambda x, repeats: x.repeat(*repeats))
maps("cat.default")(lambda tensors, dim=0: oneflow().cat(list(tensors), dim=dim))
maps("stack.default")(lambda tensors, dim=0: oneflow().stack(list(tensors), dim=dim))


@maps("split.Tensor", "split_with_sizes.default")
def _split(x: Any, split_size: int | Sequence[int], dim: int = 0) -> Any:
    return oneflow().split(x, split_size if isinstance(split_size, int) else list(split_size), dim)


maps("chunk.default")(lambda x, chunks, dim=0: oneflow().split(x, math.ceil(x.shape[dim] / chunks), dim))
maps("unbind.int")(lambda x, dim=0: [oneflow().select(x, dim, index) for index in range(x.shape[dim])])
maps("select.int")(lambda x, dim, index: oneflow().select(x, dim % len(x.shape), index % x.shape[dim]))


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


# --- dtypes and copies -----------------------------------------------------------------------------------------------


maps("_to_copy.default", "to.dtype_layout")(lambda x, *, dtype=None, **_: cast(x, dtype))
maps("to.dtype")(lambda x, dtype, *_, **__: cast(x, dtype))
maps("type_as.default")(lambda x, other: x.to(other.dtype))


@maps("copy.default")
def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    result = source.to(target.dtype)
    return result if tuple(result.shape) == tuple(target.shape) else result.expand(*target.shape)


maps("zeros_like.default", "empty_like.default")(lambda x, **_: oneflow().zeros_like(x))
