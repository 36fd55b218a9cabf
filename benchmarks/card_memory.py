"""The memory of the device and of a server: watched while prompts run, and held so that the card is a smaller one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch

GIB = 2**30


def used_bytes() -> int:
    """Bytes of the device that are in use; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


_BALLAST = """
import sys, time, torch
held, want = [torch.zeros(1, device="cuda")], float(sys.argv[1]) * 2**30
for step in (2**30, 2**26, 2**22):
    while torch.cuda.mem_get_info()[0] - want > step:
        held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class Memory:
    """Watches the device's and a process tree's memory in a thread. Bytes."""

    process: psutil.Process
    device: int = 0
    host: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.device = max(self.device, used_bytes())
            with contextlib.suppress(psutil.Error):
                self.host = max(self.host, self.process.memory_info().rss)

    def take(self) -> dict[str, float]:
        """The peaks since the last `take`, in GiB."""
        found = {"device_gib": round(self.device / GIB, 3), "host_gib": round(self.host / GIB, 3)}
        self.device = self.host = 0
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def small_card(gib: float | None) -> Iterator[None]:
    """Hold device memory in another process, so that `gib` GiB are free. Nothing is held without a GPU."""
    if gib is None or not torch.cuda.is_available():
        yield
        return
    held = subprocess.Popen([sys.executable, "-c", _BALLAST, str(gib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout is not None and held.stdin is not None
    held.stdout.readline()
    try:
        yield
    finally:
        held.stdin.close()
        held.wait()
