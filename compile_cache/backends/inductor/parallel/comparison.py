"""Compare a worker's code with its original on random inputs, no larger than needed.

A prompt waits meanwhile, and may be short of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ....torch_facts.out_of_memory import is_out_of_memory
from ..compile.compiled_region import CompiledRegion
from ..compile.shape_guards import Verdict
from ..compile.tracing import region_format
from ..regions.numerics_check import difference_from_original
from ..regions.region import RegionCall, is_integer, may_run

_ENOUGH = 1 << 20  # elements of the largest input
_SMALLEST = 16  # of a dimension: code that handles sizes in blocks should have an incomplete one


def is_right(call: RegionCall, compiled: CompiledRegion) -> bool:
    """`may_run` with random inputs, and the call's own integers. call: its other tensors need no contents.

    Code that agrees at small sizes is right at all sizes that its guards allow. If the small sizes fit the block badly,
    the sizes of the call decide. Raises what `may_run` raises.
    """
    small = _small_sizes(call)
    possible = compiled.guards.check(small)[0] is not Verdict.BROKEN
    allowed = compiled.guards.check(call.sizes)[0] is Verdict.HOLDS
    if small != call.sizes and possible and allowed and _agrees(_random(call, small), compiled):
        call.stats.counters.verifications += 1
        return may_run(call, compiled, compared=True)
    return may_run(_random(call, call.sizes), compiled)


def _small_sizes(call: RegionCall) -> dict[str, int]:
    """Sizes by name of a dimension: the longest is halved until the inputs have few elements.

    With integers among the inputs, the sizes of the call: an index would leave a smaller table.
    """
    sizes = dict(call.sizes)
    if any(map(is_integer, call.tensors)):
        return sizes
    while max(math.prod(shape) for shape in _shapes(call, sizes)) > _ENOUGH:
        name = max(sizes, key=lambda each: sizes[each], default=None)
        if name is None or sizes[name] <= _SMALLEST:
            break
        sizes[name] = max(-(-sizes[name] // 2), _SMALLEST)
    return sizes


def _shapes(call: RegionCall, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    return [
        tuple(size if name is None else sizes[name] for name, size in zip(names, tensor.shape, strict=True))
        for names, tensor in zip(call.site.dims, call.tensors, strict=True)
    ]


def _random(call: RegionCall, sizes: dict[str, int]) -> RegionCall:
    inputs = [
        _noise(shape, each, region_format(each, dims), seed)
        for seed, (shape, each, dims) in enumerate(zip(_shapes(call, sizes), call.tensors, call.site.dims, strict=True))
    ]
    return replace(call, tensors=inputs)


def _noise(shape: Sequence[int], like: torch.Tensor, memory_format: torch.memory_format, seed: int) -> torch.Tensor:
    """Normal noise, both values in a mask; `like` itself if it has integers.

    The same values each time, from a generator of its own: images may depend on torch's global one.
    """
    if is_integer(like):
        return like
    made = torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format)
    generator = torch.Generator(like.device).manual_seed(seed)
    if like.dtype is torch.bool:
        return made.random_(0, 2, generator=generator)
    return made.normal_(generator=generator)


def _agrees(call: RegionCall, compiled: CompiledRegion) -> bool:
    cancellations = call.progress.cancellations
    try:
        return difference_from_original(compiled, call.site, call.weights, call.tensors, cancellations) is None
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, cancellations):
            raise
        return False  # the original refuses such sizes: one dimension may depend on another
