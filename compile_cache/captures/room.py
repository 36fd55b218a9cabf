"""The memory that a call could have, and the calls that wait until there is more of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..backends.cuda_graphs.memory import driver_graph_bytes, is_trimmable
from ..errors import BypassReason
from ..keys import CallWithoutEpoch, CaptureKey

_CHECK_SECONDS = 1.0  # between two looks at the device's memory
_RETRY_SECONDS = 300.0  # then a capture is tried again, whatever is free
_MORE = 256 << 20  # so many bytes more must be within reach to try before

Reach = Callable[[str], int]  # of a device ("cuda:0")


@dataclass(slots=True)
class _Wait:
    reason: BypassReason
    reach: int
    check_at: float
    retry_at: float


def free_bytes(device: str) -> int:
    """Bytes that a device ("cuda:0") could give; 0 where that is unknown. Among them is what torch keeps unused, and
    what the driver keeps for graphs, in which the next capture works too.
    """
    if not device.startswith("cuda"):
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    of_graphs = driver_graph_bytes(torch.device(device).index or 0) if is_trimmable() else 0
    return torch.cuda.mem_get_info(device)[0] + max(unused, 0) + of_graphs


class OutOfMemoryBackoff:
    """Calls that are not captured for lack of memory, until more is within reach or five minutes have passed.

    reach: the bytes that a device could give, those of weights included that could be unloaded; 0 if that is unknown.
    What is merely free rises as soon as another model has pushed weights out, though the next capture needs them again.
    """

    def __init__(self, reach: Reach = free_bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._reach, self._clock = reach, clock
        self._waits: dict[CallWithoutEpoch, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, key: CaptureKey, reason: BypassReason) -> None:
        now = self._clock()
        wait = _Wait(reason, self._reach(key.device), now + _CHECK_SECONDS, now + _RETRY_SECONDS)
        self._waits[key.without_epoch] = wait

    def reason(self, key: CaptureKey) -> BypassReason | None:
        wait = self._waits.get(key.without_epoch) if self._waits else None
        if wait is None:
            return None
        now = self._clock()
        if now < wait.check_at:
            return wait.reason
        wait.check_at = now + _CHECK_SECONDS
        if now < wait.retry_at and self._reach(key.device) < wait.reach + _MORE:
            return wait.reason
        del self._waits[key.without_epoch]
        return None

    def clear(self) -> None:
        self._waits.clear()

    def forget(self, owner: int) -> None:
        self._waits = {call: wait for call, wait in self._waits.items() if call.owner != owner}
