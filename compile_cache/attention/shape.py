"""The shape of an attention call, which is the key of its kernel choice, and the distance between two shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2
from typing import cast

from ..tuning.tuner import Trial
from .kernels import AttentionArgs, switches

_NEAR = 1.0  # in powers of two: a measured shape serves others within a factor of 2 of its batch and tokens

Sizes = tuple[int, int, int, int]  # (batch, heads, tokens, width); for a mask (batch, heads, queries, keys)


@dataclass(frozen=True)
class Shape:
    """The shape of an attention call. switches: see `kernels.switches`.

    mask: the mask's shape before broadcasting; empty without a mask.
    """

    dtype: str
    q: Sizes
    k: Sizes
    v_width: int
    switches: tuple[bool, ...]
    mask: Sizes | tuple[()] = ()
    mask_dtype: str = ""

    def distance(self, other: Shape) -> float:
        """Return the largest difference of batch, queries or keys, in powers of two; infinite if the kinds differ."""
        if self._kind() != other._kind():
            return float("inf")
        pairs = ((self.q[0], other.q[0]), (self.q[2], other.q[2]), (self.k[2], other.k[2]))
        return max(abs(log2(a / b)) if a and b else float(a != b) * 99 for a, b in pairs)

    def _kind(self) -> tuple[object, ...]:
        shared = tuple(size == 1 for size in self.mask)  # True for a broadcast dimension: batch, heads, queries, keys
        sizes = (self.q[1], self.q[3], self.k[1], self.k[3], self.v_width)
        return self.dtype, sizes, self.switches, self.mask_dtype, shared


@dataclass(frozen=True)
class Choice(Trial):
    """A trial of kernels. chosen: "torch" for torch's own choice. like: the tokens (queries, keys) of another shape
    whose measurement this choice reuses; None if this shape was measured.
    """

    like: tuple[int, int] | None = None


def shape_of(args: AttentionArgs) -> Shape:
    q, k, v, mask, _, _ = args  # enable_gqa shows in the head counts of q and k
    of_mask = () if mask is None else (tuple(mask.shape), str(mask.dtype))
    of_q, of_k = cast("Sizes", tuple(q.shape)), cast("Sizes", tuple(k.shape))
    return Shape(str(q.dtype), of_q, of_k, int(v.shape[-1]), switches(), *of_mask)


def nearest(shape: Shape, entries: Iterable[tuple[Shape, Choice]]) -> tuple[Shape, Choice] | None:
    """Return the nearest measured shape with its choice, or None if none is near enough to run the same kernel."""
    measured = [(shape.distance(each), each, choice) for each, choice in entries if choice.like is None]
    distance, near, choice = min(measured, key=lambda found: found[0], default=(float("inf"), None, None))
    return (near, choice) if distance <= _NEAR and near is not None and choice is not None else None
