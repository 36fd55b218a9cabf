"""Time the work that the host launches on a device, and measure the cost of one forward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch


class Stopwatch:
    """Two events on the current stream of a GPU; the first is recorded now. The host does not wait."""

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
        """Return the seconds between the two events, after `stop`; None if the second is pending. wait: wait for it."""
        before, after = self._events
        if wait:
            after.synchronize()
        is_over: bool = after.query()  # type: ignore[no-untyped-call]
        return before.elapsed_time(after) / 1000 if is_over else None


def stopwatch_on(device: torch.device) -> Stopwatch | None:
    """A new stopwatch; None on the CPU."""
    return Stopwatch(device) if device.type == "cuda" else None


@dataclass
class RunCost:
    """bytes: peak of the run's allocations; 0 if it is unknown (on the CPU).
    host_seconds: until the host had launched the whole run. watch: times the GPU; None on the CPU."""

    bytes: int = 0
    host_seconds: float = 0.0
    watch: Stopwatch | None = None

    def host_share(self) -> float:
        """Return the host's seconds as a share of the GPU's; 1.0 if they are unknown. Waits for the GPU.

        At 1.0 or more the GPU waited for the host, and a capture, which is a single launch, is faster. A small share
        means that the GPU was busy all the time. A first run always has a high share, because the host loads kernels.
        """
        seconds = self.seconds()
        return self.host_seconds / seconds if seconds else 1.0

    def seconds(self) -> float:
        """Return the GPU's seconds, including its waits for the host; 0.0 if they are unknown. Waits for the GPU."""
        return (self.watch.seconds(wait=True) or 0.0) if self.watch is not None else 0.0


@contextlib.contextmanager
def cost_of_run(device: str) -> Iterator[RunCost]:
    """Measure a run on the current stream of a device ("cuda:0"). Memory allocated before does not count."""
    if not device.startswith("cuda"):
        yield RunCost()
        return
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    with torch.cuda.device(device):
        watch = Stopwatch(torch.device(device))
        cost = RunCost(watch=watch)
        started = time.perf_counter()
        yield cost
        cost.host_seconds = time.perf_counter() - started
        watch.stop()
    cost.bytes = torch.cuda.max_memory_allocated(device) - allocated
