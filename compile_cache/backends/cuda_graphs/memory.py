"""The driver's own memory for CUDA graphs.

Under cudaMallocAsync a graph's memory belongs to the driver, outside torch's allocator: it stays reserved when the
graph dies, until it is trimmed. torch has no call for that, so the driver is asked directly.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import torch

logger = logging.getLogger(__name__)


def release_graph_memory() -> None:
    """Give graph memory that no live graph needs back to the system, on every device in use."""
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
