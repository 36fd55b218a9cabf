"""The memory pool that all captures of a device share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .memory import driver_graph_bytes, is_trimmable


class Pools:
    """One memory pool per device for all graphs: they can share it, because no two graphs run at the same time.

    torch deletes a pool with its last graph, and then a capture with the pool's handle fails. So a tiny graph on each
    device, the anchor, keeps the pool alive. Closing the last capture resets the anchor, which frees the pool.
    """

    def __init__(self) -> None:
        self._anchors: dict[int, torch.cuda.CUDAGraph] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._graphs: Counter[int] = Counter()
        self._grown: Counter[int] = Counter()

    def stream(self, device: int) -> torch.cuda.Stream:
        """The stream of all captures on a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def pool(self, device: int) -> Any:
        if device not in self._anchors:
            anchor = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream(device)):
                anchor.capture_begin(capture_error_mode="thread_local")
                try:
                    torch.zeros(1, device=f"cuda:{device}")
                finally:  # out of memory: a stream left in capture mode would draw other streams into its capture
                    anchor.capture_end()
            self._anchors[device] = anchor
        return self._anchors[device].pool()

    def opened(self, device: int, growth: int) -> None:
        """A graph was captured; its first mapping grew the pool by `growth` bytes."""
        self._graphs[device] += 1
        self._grown[device] += growth

    def broke(self, device: int) -> None:
        """CUDA broke a capture in the device's pool. torch refuses further captures in that pool, so the next capture
        gets a new pool. Graphs captured in the old pool keep it alive."""
        if (anchor := self._anchors.pop(device, None)) is not None:
            anchor.reset()

    def closed(self, device: int) -> None:
        self._graphs[device] -= 1
        if self._graphs[device] == 0 and device in self._anchors:
            self._anchors.pop(device).reset()
            self._grown[device] = 0

    def bytes(self, only: int | None = None) -> int:
        """The bytes of the pools of all devices, or of device `only`."""
        devices = [device for device, count in self._graphs.items() if count and only in (None, device)]
        return sum(driver_graph_bytes(device) if is_trimmable() else self._grown[device] for device in devices)


shared = Pools()


def pool_bytes(device: int | None = None) -> int:
    """Bytes that captures share beside their own buffers. A capture that needs no more than these adds none.

    device: the device's number; None for all devices.
    """
    return shared.bytes(device)
