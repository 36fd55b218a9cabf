"""Which attention kernel each shape runs, kept on disk: two starts of ComfyUI compute the same picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from math import log2
from typing import Any

import torch

from ..choices import machine_table
from ..choices.machine_table import MachineTable, sizes_in, text_in
from .kernels import FLASH_3, Given, switches

_NEAR = 1.0  # a power of two: a measured shape serves others within a factor of 2 of its batch and tokens


@dataclass(frozen=True)
class Shape:
    """A call of attention. q, k: (batch, heads, tokens, width). switches: see `kernels.switches`.

    mask: its shape, as it is given; empty for none.
    """

    dtype: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v_width: int
    switches: tuple[bool, ...]
    mask: tuple[int, ...] = ()
    mask_dtype: str = ""

    def distance(self, other: Shape) -> float:
        """The power of two by which batches or tokens (queries, keys) differ; infinite for another kind of call."""
        if self._kind() != other._kind():
            return float("inf")
        pairs = ((self.q[0], other.q[0]), (self.q[2], other.q[2]), (self.k[2], other.k[2]))
        return max(abs(log2(a / b)) if a and b else float(a != b) * 99 for a, b in pairs)

    def _kind(self) -> tuple[object, ...]:
        shared = tuple(size == 1 for size in self.mask)  # by the batch, all heads, all queries, all keys
        sizes = (self.q[1], self.q[3], self.k[1], self.k[3], self.v_width)
        return self.dtype, sizes, self.switches, self.mask_dtype, shared


def shape_of(given: Given) -> Shape:
    q, k, v, mask, _, _ = given  # groups show in the heads of q and k
    of_mask = () if mask is None else (tuple(mask.shape), str(mask.dtype))
    return Shape(str(q.dtype), tuple(q.shape), tuple(k.shape), int(v.shape[-1]), switches(), *of_mask)


@dataclass(frozen=True)
class Choice:
    """kernel: its name, "torch" for what torch chooses itself. failed: why a kernel cannot run, by its name.

    like: the tokens (queries, keys) of the shape that was measured, if that was another one.
    """

    kernel: str = "torch"
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    like: tuple[int, int] | None = None


def machine_of(device: torch.device) -> tuple[str, ...]:
    """The machine and the versions that the times of kernels depend on, beside the shape."""
    found = machine_table.machine_of(device)
    return (*found, "flash 3") if device.type == "cuda" and find_spec(FLASH_3) is not None else found


class ChoiceTable(MachineTable[Shape, Choice]):
    """The choices of one machine."""

    what, format = "the choices of attention kernels", 3

    def near(self, shape: Shape) -> tuple[Shape, Choice] | None:
        """The measured shape that is nearest to this one, if it is near enough to run the same kernel."""
        measured = [(shape.distance(each), each, choice) for each, choice in self if choice.like is None]
        distance, nearest, choice = min(measured, key=lambda found: found[0], default=(float("inf"), None, None))
        return (nearest, choice) if distance <= _NEAR and nearest is not None and choice is not None else None

    def plain(self, key: Shape, value: Choice) -> dict[str, Any]:
        return {**asdict(key), **asdict(value)}

    def entry(self, data: Any) -> tuple[Shape, Choice]:
        q, k = (sizes_in(data[name], 4) for name in ("q", "k"))
        mask = sizes_in(data["mask"], 4 if data["mask"] else 0)
        shape = Shape(
            text_in(data["dtype"]), q, k, sizes_in([data["v_width"]], 1)[0], tuple(map(bool, data["switches"])),
            mask, text_in(data["mask_dtype"]),
        )  # fmt: skip
        milliseconds = {text_in(name): float(value) for name, value in data["milliseconds"].items()}
        failed = {text_in(name): text_in(why) for name, why in data["failed"].items()}
        like = None if data["like"] is None else sizes_in(data["like"], 2)
        kernel = text_in(data["kernel"])
        return shape, Choice(kernel, milliseconds, failed, None if like is None else (like[0], like[1]))
