"""Memory of the device for CUDA graphs: what a capture will need, room for it, and how to give it back.

Under cudaMallocAsync the memory of a graph belongs to the driver, not to torch's allocator, and the driver keeps it
after the graph is deleted until it is trimmed. torch has no function for that, so call the driver's
`cuDeviceGraphMemTrim`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import pools

logger = logging.getLogger(__name__)


def release_graph_memory() -> None:
    """Free graph memory that no graph uses, on every device. Does nothing without an NVIDIA driver in use."""
    if not torch.cuda.is_available() or torch.version.hip is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        trim = driver.cuDeviceGraphMemTrim
    except (OSError, AttributeError) as error:
        logger.debug("the driver cannot trim graph memory: %s", error)
        return
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
        result = trim(ctypes.c_int(device))
        if result != 0:
            logger.debug("cuDeviceGraphMemTrim on device %d answered %d", device, result)
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        pools.shared.sizes.trimmed()


@dataclass
class Peak:
    """bytes: what a run allocated at once, at most; 0 if that is unknown (on the CPU)."""

    bytes: int = 0


@contextlib.contextmanager
def peak_of_run(device: str) -> Iterator[Peak]:
    """Measure the memory that a run on a device ("cuda:0") takes beside what was allocated before."""
    peak = Peak()
    if not device.startswith("cuda"):
        yield peak
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield peak
    peak.bytes = torch.cuda.max_memory_allocated(device) - before


def make_room(device: int, needed: int) -> None:
    """Leave `needed` bytes to the driver, which maps the memory of a graph at its first launch.

    The driver cannot ask others for memory: torch's allocator keeps what it once had, and ComfyUI's pages of weights
    take what is free. Both give way to an ordinary allocation. They must do so now: unloading pages waits for the GPU,
    which would end a capture. Raises torch's OutOfMemoryError.
    """
    torch.cuda.empty_cache()
    torch.empty(needed, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.empty_cache()
