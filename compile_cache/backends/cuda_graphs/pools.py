"""The memory that all captures of a device work in, and how large it grew."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


class PoolSizes:
    """The high-water mark of each device's pool, in bytes.

    A pool serves all graphs of its device, so the first capture makes it grow by what a forward works in, and a later
    one only by what it needs beyond that. Closing a graph does not shrink it.
    """

    def __init__(self) -> None:
        self._mapped: Counter[int] = Counter()  # since the driver last took back what no graph used
        self._marks: Counter[int] = Counter()
        self._graphs: Counter[int] = Counter()

    def opened(self, device: int, growth: int) -> None:
        """A graph was captured; its capture and first launch took `growth` bytes of the device."""
        self._graphs[device] += 1
        self._mapped[device] += max(growth, 0)
        self._marks[device] = max(self._marks[device], self._mapped[device])

    def closed(self, device: int) -> None:
        self._graphs[device] -= 1

    def trimmed(self) -> None:
        """The driver took back all graph memory (cudaMallocAsync only). Living graphs map it again when launched."""
        self._mapped.clear()
        self._marks = Counter({device: mark for device, mark in self._marks.items() if self._graphs[device] > 0})

    def bytes(self) -> int:
        """What the pools of all devices hold at most. A capture that works in no more than that adds nothing."""
        return sum(self._marks.values())


class Pools:
    """One memory pool per device for all graphs: no two of them run at the same time, so they can share it.

    torch deletes a pool with its last graph, and then a capture with the pool's handle fails. So a tiny graph on each
    device keeps the pool.
    """

    def __init__(self) -> None:
        self._anchors: dict[int, torch.cuda.CUDAGraph] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.sizes = PoolSizes()

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
                torch.zeros(1, device=f"cuda:{device}")
                anchor.capture_end()
            self._anchors[device] = anchor
        return self._anchors[device].pool()


shared = Pools()


def pool_bytes() -> int:
    """Bytes that captures share beside their own buffers."""
    return shared.sizes.bytes()
