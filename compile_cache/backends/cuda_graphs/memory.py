"""Device memory for CUDA graphs: estimate a capture's need, make room for it, and release it.

Under cudaMallocAsync the memory of a graph belongs to the driver, not to torch's allocator. Between two launches, and
after the graph is deleted, the driver keeps it until it is trimmed; the next launch maps it again. torch has no
function to trim, so we call the driver's `cuDeviceGraphMemTrim`. Under torch's own allocator all graphs of a device
share one pool, which is freed with the last graph.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import torch

from ...torch_compat.gpu import is_nvidia
from ...torch_compat.private_names import is_in_use

logger = logging.getLogger(__name__)

_trims = 0
_ROUNDING = 64 << 20  # the driver rounds each allocation up to 2 MiB
_RESERVED_NOW = 2  # CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT


def trim_count() -> int:
    """The number of times that memory of live graphs was released. A graph maps it again at its next launch."""
    return _trims


def is_trimmable() -> bool:
    """True if the memory of live graphs can be released, because it belongs to the driver."""
    return _on_nvidia() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def _on_nvidia() -> bool:
    return is_nvidia("cuda") and torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def driver_graph_bytes(device: int) -> int:
    """Bytes of a device that the driver reserves for graphs now; 0 if unknown."""
    held = ctypes.c_uint64(0)
    try:
        answer = _driver().cuDeviceGetGraphMemAttribute(ctypes.c_int(device), _RESERVED_NOW, ctypes.byref(held))
    except (OSError, AttributeError) as error:
        logger.debug("the driver does not say what graphs hold: %s", error)
        return 0
    return held.value if answer == 0 else 0


def release_graph_memory() -> None:
    """Free unused graph memory on every device that this process uses; a query on another device would create a context
    of half a GiB there. Does nothing if CUDA is not initialized on an NVIDIA GPU.
    """
    global _trims
    if not _on_nvidia():
        return
    _trims += is_trimmable()
    try:
        trim = _driver().cuDeviceGraphMemTrim
    except (OSError, AttributeError) as error:
        logger.debug("the driver cannot trim graph memory: %s", error)
        return
    for device in filter(is_in_use, range(torch.cuda.device_count())):
        torch.cuda.synchronize(device)
        result = trim(ctypes.c_int(device))
        if result != 0:
            logger.debug("cuDeviceGraphMemTrim on device %d answered %d", device, result)


def room_for(needed: int) -> int:
    """Upper bound, in bytes, for the memory of a graph whose run allocates `needed` bytes."""
    return needed + needed // 8 + _ROUNDING


def make_room(device: int, needed: int, spare: int = 0) -> None:
    """Free device memory for the driver, which maps a graph's memory at its first launch: enough for a run that
    allocates `needed` bytes, and `spare` bytes more.

    The driver cannot reclaim memory from others: torch's allocator caches freed blocks, and ComfyUI's weight pages fill
    the free memory. An ordinary allocation makes both release memory. It must happen now: unloading pages waits for the
    GPU, which would break a capture. Raises torch's OutOfMemoryError.
    """
    torch.cuda.empty_cache()
    torch.empty(room_for(needed) + spare, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.empty_cache()


def map_memory(graph: torch.cuda.CUDAGraph) -> None:
    """Let the driver map the memory of a captured graph now, on the current stream, without running a kernel.

    Otherwise the first launch maps it. If the driver or torch has no function for it, the graph is launched once.
    """
    try:
        program = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        answer = _driver().cuGraphUpload(program, stream)
    except (OSError, AttributeError) as error:
        logger.debug("the memory of a graph cannot be mapped alone: %s", error)
        answer = -1
    if answer != 0:
        graph.replay()
