"""The memory of the device and of a server: watched while prompts run, and held so that the card is smaller."""

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
    """Bytes of the device that are in use; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def settled_bytes(still: float) -> tuple[int, float]:
    """Bytes in use once they have stayed the same for so many seconds, and the seconds until then. ComfyUI frees after
    it has answered.
    """
    started = changed = time.monotonic()
    used = used_bytes()
    while (now := time.monotonic()) - changed < still and now - started < 8 * still:
        time.sleep(0.1)
        if (found := used_bytes()) != used:
            used, changed = found, time.monotonic()
    return used, changed - started


def processes_mib() -> list[int]:
    """MiB of the device that each process holds, as far as the driver says; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return sorted((int(each) for each in said if each.isdigit()), reverse=True)


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
    """Hold device memory in another process, so that `gib` GiB are free. Nothing is held without a GPU.

    Enter it before the server starts: what a running server holds would be missing from the card that it sees. Raises
    ServerError at once if the card is too small.
    """
    with ballast.held(gib if torch.cuda.is_available() else None, sys.executable):
        yield
