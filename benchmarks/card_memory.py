"""Watch the memory of the device and of a server while prompts run, and occupy memory to emulate a smaller card."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch

from . import ballast

GIB = 2**30


def used_bytes() -> int:
    """Bytes of device memory in use; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def settled_bytes(still: float) -> tuple[int, float]:
    """Bytes in use once they have not changed for `still` seconds (at most 8 times as long), and the seconds until the
    last change. ComfyUI frees memory after it has answered.
    """
    started = changed = time.monotonic()
    used = used_bytes()
    while (now := time.monotonic()) - changed < still and now - started < 8 * still:
        time.sleep(0.1)
        if (found := used_bytes()) != used:
            used, changed = found, time.monotonic()
    return used, changed - started


def processes_mib() -> list[int]:
    """MiB of device memory of each process, as far as the driver reports them; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return sorted((int(each) for each in said if each.isdigit()), reverse=True)


@dataclass
class Memory:
    """Records the peaks of the device's memory and of a process's RSS, in bytes, in a thread."""

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
    """Occupy device memory in another process, so that `gib` GiB are free. Does nothing without a GPU.

    Enter it before the server starts: a running server's memory would be missing from the card that it sees. Raises
    ServerError if the card is too small.
    """
    with ballast.occupy_memory(gib if torch.cuda.is_available() else None, sys.executable):
        yield
