"""Compute nearest upsampling and `torch.linspace` from position indices, because sizes are symbols in a trace.

Nearest upsampling by an integer factor reads a source index. Torch computes the index from quotients of the sizes: two
float64 divisions per thread, and a GeForce runs float64 at 1/64 of its float32 rate.

`torch.linspace` does not accept a symbolic number of steps: each size would compile its own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_NEAREST = ("nearest", "nearest-exact")  # equal for integer factors


class ByIndex(TorchFunctionMode):
    """In this block and thread, compute torch.linspace from indices, and torch.nn.functional.interpolate for
    channels-last maps.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.linspace and any(isinstance(each, torch.SymInt) for each in (*args, *given.values())):
            return evenly_spaced(*args, **given)
        if function is not torch.nn.functional.interpolate or len(args) != 1:
            return function(*args, **given)
        (x,) = args
        factors = _factors(x.ndim - 2, given) if is_channels_last(x) else ()
        return repeated(x, factors) if factors else function(x, **given)


def evenly_spaced(
    start: float, end: float, steps: int, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any
) -> torch.Tensor:
    """The values of torch.linspace for the same arguments; each is computed from the nearer end, as torch does."""
    dtype = dtype or torch.get_default_dtype()
    place, last = torch.arange(steps, dtype=dtype, device=device), torch.full((), steps - 1, dtype=dtype, device=device)
    step = (end - start) / last.clamp(min=1)
    return torch.where(place * 2 <= last, start + step * place, end - step * (last - place))


def repeated(x: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
    """Repeat each position of a map (batch, channels, ..., height, width), by one integer factor per dimension."""
    by_dimension = list(zip(x.shape[2:], factors, strict=True))
    places = [torch.arange(size * factor, device=x.device) // factor for size, factor in by_dimension]
    return read(x, places)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """True for a channels-last map of pictures or frames. Reads only a stride: a branch on a size would add a guard."""
    return tensor.ndim in (4, 5) and isinstance(stride := tensor.stride(1), int) and stride == 1


def read(x: torch.Tensor, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Index a map (batch, channels, ..., height, width) by one vector per dimension after channels. Channels-last."""
    grid = [place.reshape(-1, *(1,) * (len(places) - 1 - at)) for at, place in enumerate(places)]
    result: torch.Tensor = _aten._unsafe_index(x.movedim(1, -1), [None, *grid]).movedim(-1, 1)
    return result


def _factors(dimensions: int, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The integer factors of an `interpolate` call with these keywords; empty if it does anything else."""
    scale = given.get("scale_factor")
    is_plain = not any(value for name, value in given.items() if name not in ("scale_factor", "mode"))
    if scale is None or not is_plain or given.get("mode", "nearest") not in _NEAREST:
        return ()
    factors = tuple(scale) if isinstance(scale, tuple | list) else (scale,) * dimensions
    return tuple(map(int, factors)) if all(factor == int(factor) >= 1 for factor in factors) else ()
