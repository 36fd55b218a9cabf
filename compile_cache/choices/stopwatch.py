"""The seconds that a device works on what the host asks of it."""

from __future__ import annotations

import torch


class Stopwatch:
    """Two events on the current stream of a GPU, the first one now. The host goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._record(0)

    def stop(self) -> None:
        self._record(1)

    def _record(self, number: int) -> None:
        with torch.cuda.device(self._device):
            self._events[number].record()

    def seconds(self, wait: bool) -> float | None:
        """After `stop`; None if the device is not there yet. wait: for it."""
        before, after = self._events
        if wait:
            after.synchronize()
        is_over: bool = after.query()  # type: ignore[no-untyped-call]
        return before.elapsed_time(after) / 1000 if is_over else None


def stopwatch_on(device: torch.device) -> Stopwatch | None:
    """A new stopwatch; None on the CPU."""
    return Stopwatch(device) if device.type == "cuda" else None
