"""Free the memory that the driver keeps for CUDA graphs.

Under cudaMallocAsync the memory of a graph belongs to the driver, not to torch's allocator, and the driver keeps it
after the graph is deleted until it is trimmed. torch has no function for that, so call the driver's
`cuDeviceGraphMemTrim`.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import torch

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
