"""The memory that all captures of a device work in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .memory import driver_graph_bytes, is_trimmable


class Pools:
    """One memory pool per device for all graphs: no two of them run at the same time, so they can share it.

    torch deletes a pool with its last graph, and then a capture with the pool's handle fails. So a tiny graph on each
    device keeps the pool. It goes with the last capture, and the pool's memory with it.
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
                finally:  # a full card: a stream that stays in a capture takes others into it
                    anchor.capture_end()
            self._anchors[device] = anchor
        return self._anchors[device].pool()

    def opened(self, device: int, growth: int) -> None:
        """A graph was captured; with its first launch the pool grew by so many bytes."""
        self._graphs[device] += 1
        self._grown[device] += growth

    def broke(self, device: int) -> None:
        """CUDA broke a capture in the device's pool. torch refuses any other in that pool, so the next one gets a new
        pool. Graphs that were made in the old one keep it."""
        if (anchor := self._anchors.pop(device, None)) is not None:
            anchor.reset()

    def closed(self, device: int) -> None:
        self._graphs[device] -= 1
        if self._graphs[device] == 0 and device in self._anchors:
            self._anchors.pop(device).reset()
            self._grown[device] = 0

    def bytes(self, only: int | None = None) -> int:
        """The bytes that the pools of all devices hold, or that of one."""
        devices = [device for device, count in self._graphs.items() if count and only in (None, device)]
        return sum(driver_graph_bytes(device) if is_trimmable() else self._grown[device] for device in devices)


shared = Pools()


def pool_bytes(device: int | None = None) -> int:
    """Bytes that captures share beside their own buffers. One that needs no more than that adds none.

    device: its number; None for all devices.
    """
    return shared.bytes(device)
