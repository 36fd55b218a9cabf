"""Makes core's code between regions use their memory format.

That code concatenates, repeats and folds frames into contiguous maps. On CUDA, regions take and return channels-last
maps, so each map is converted twice by a strided copy: a third of LTX's decode on an H100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def channels_last(x: torch.Tensor) -> AbstractContextManager[Any]:
    """`ChannelsLastMode` if x is on CUDA, where regions take it channels-last; else a context that does nothing."""
    return ChannelsLastMode() if x.is_cuda else nullcontext()


class ChannelsLastMode(TorchFunctionMode):
    """Makes the results of `cat`, `repeat` and `rearrange`'s last `reshape` channels-last, in this thread only. Results
    are (batch, channels, frames, height, width), with torch's values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = _AS_CHANNELS_LAST.get(func)
        result = None if instead is None else instead(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first = tensors[0]
    if first.ndim != 5 or any(each.dtype != first.dtype for each in tensors):
        return None
    sizes = [each.shape[dim] for each in tensors]
    shape = [*first.shape[:dim], sum(sizes), *first.shape[dim:][1:]]
    result = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=torch.channels_last_3d)
    for part, each in zip(torch.split(result, sizes, dim), tensors, strict=True):
        part.copy_(each)
    return result


def _repeated(x: torch.Tensor, *times: Any) -> torch.Tensor | None:
    counts = times[0] if isinstance(times[0], Sequence) else times
    if x.ndim != 5 or len(counts) != 5:
        return None
    result: torch.Tensor | None = None
    for dim, count in enumerate(counts):
        if count != 1:
            result = _joined([x if result is None else result] * count, dim)
    return result


def _folded(x: torch.Tensor, *shape: Any) -> torch.Tensor | None:
    """The last step of `rearrange`: (b, c, d, 2, h, 2, w, 2) to (b, c, 2d, 2h, 2w)."""
    batch, channels, *sizes = shape[0] if isinstance(shape[0], Sequence) else shape
    if x.ndim != 8 or len(sizes) != 3 or tuple(x.shape[:2]) != (batch, channels):
        return None
    return x.movedim(1, -1).reshape(batch, *sizes, channels).movedim(-1, 1)


_AS_CHANNELS_LAST: dict[Any, Callable[..., Any]] = {
    torch.cat: _joined,
    torch.Tensor.repeat: _repeated,
    torch.Tensor.reshape: _folded,
}
