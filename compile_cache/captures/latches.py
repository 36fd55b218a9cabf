"""Calls that are not captured for lack of memory, until there may be enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import BypassReason
from ..keys import CaptureKey, GraphKey

_CHECK_SECONDS = 1.0  # between two looks at the device's memory
_RETRY_SECONDS = 300.0  # then it is tried again, whatever is free; twice as long after each failure
_MORE = 256 << 20  # so many bytes more must be free

_Place = tuple[str, int, GraphKey]  # the device, the module's number, and the call without its weights epoch


@dataclass(slots=True)
class _Latch:
    reason: BypassReason
    free: int
    check_at: float
    retry_at: float


def free_bytes(device: str) -> int:
    """Bytes that a device ("cuda:0") could give, torch's unused ones included; 0 where that is unknown."""
    if not device.startswith("cuda"):
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + max(unused, 0)


class MemoryLatches:
    """Why calls are not captured for lack of memory. An entry goes when more memory is free, or after a while.

    It belongs to a device and a shape: another load of the same weights needs as much. GraphCache's lock guards it.
    """

    def __init__(self, free: Callable[[str], int] = free_bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._free, self._clock = free, clock
        self._latches: dict[_Place, _Latch] = {}
        self._failures: dict[_Place, int] = {}

    def block(self, key: CaptureKey, reason: BypassReason) -> None:
        place, now = _place(key), self._clock()
        failures = self._failures[place] = self._failures.get(place, 0) + 1
        wait = _RETRY_SECONDS * 2 ** min(failures - 1, 10)
        self._latches[place] = _Latch(reason, self._free(key.device), now + _CHECK_SECONDS, now + wait)

    def reason(self, key: CaptureKey) -> BypassReason | None:
        """Why a call is not captured now; None if nothing is known against it."""
        latch = self._latches.get(place := _place(key)) if self._latches else None
        if latch is None:
            return None
        now = self._clock()
        if now < latch.check_at:
            return latch.reason
        latch.check_at = now + _CHECK_SECONDS
        if now < latch.retry_at and self._free(key.device) < latch.free + _MORE:
            return latch.reason
        del self._latches[place]
        return None

    def clear(self) -> None:
        """Memory was freed: try everything again."""
        self._latches.clear()

    def forget(self, owner: int) -> None:
        """A module was garbage collected."""
        self._latches = {place: latch for place, latch in self._latches.items() if place[1] != owner}
        self._failures = {place: count for place, count in self._failures.items() if place[1] != owner}


def _place(key: CaptureKey) -> _Place:
    return key.device, key.owner, key.graph
