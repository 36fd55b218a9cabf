"""Results that torch computes from sizes, computed from the index of each place: sizes are symbols here.

Upsampling by a whole number of nearest pixels reads the place that it repeats. Torch computes that place from quotients
of the sizes: two divisions in float64 in each thread, of which a GeForce does one where it does 64 in float32.

`torch.linspace` takes no symbol for its steps: it would make code for each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_NEAREST = ("nearest", "nearest-exact")  # which are the same for whole numbers


class ByIndex(TorchFunctionMode):
    """Inside, in this thread, torch.linspace does so, and torch.nn.functional.interpolate for maps that lie
    channels-last.
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
    """The numbers of torch.linspace, with its arguments; from the nearer end, as torch computes them."""
    dtype = dtype or torch.get_default_dtype()
    place, last = torch.arange(steps, dtype=dtype, device=device), torch.full((), steps - 1, dtype=dtype, device=device)
    step = (end - start) / last.clamp(min=1)
    return torch.where(place * 2 <= last, start + step * place, end - step * (last - place))


def repeated(x: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
    """A map (batch, channels, ..., height, width) with each place as often as its dimension's factor says."""
    by_dimension = list(zip(x.shape[2:], factors, strict=True))
    places = [torch.arange(size * factor, device=x.device) // factor for size, factor in by_dimension]
    return read(x, places)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """A map of pictures or frames lies so. A size that is a symbol is not asked if it is 1: that would be a guard."""
    return tensor.ndim in (4, 5) and isinstance(stride := tensor.stride(1), int) and stride == 1


def read(x: torch.Tensor, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """A map (batch, channels, ..., height, width) at these places in each dimension after channels, channels-last."""
    grid = [place.reshape(-1, *(1,) * (len(places) - 1 - at)) for at, place in enumerate(places)]
    result: torch.Tensor = _aten._unsafe_index(x.movedim(1, -1), [None, *grid]).movedim(-1, 1)
    return result


def _factors(dimensions: int, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The whole factors of an `interpolate` with these keywords; empty for one that does something else."""
    scale = given.get("scale_factor")
    is_plain = not any(value for name, value in given.items() if name not in ("scale_factor", "mode"))
    if scale is None or not is_plain or given.get("mode", "nearest") not in _NEAREST:
        return ()
    factors = tuple(scale) if isinstance(scale, tuple | list) else (scale,) * dimensions
    return tuple(map(int, factors)) if all(factor == int(factor) >= 1 for factor in factors) else ()
