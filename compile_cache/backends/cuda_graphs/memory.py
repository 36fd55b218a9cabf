"""Memory of the device for CUDA graphs: what a capture will need, room for it, and how to give it back.

Under cudaMallocAsync the memory of a graph belongs to the driver, not to torch's allocator. Between two launches, and
after the graph is deleted, the driver keeps it until it is trimmed; the next launch maps it again. torch has no
function for that, so call the driver's `cuDeviceGraphMemTrim`. Under torch's own allocator all graphs of a device hold
one pool, which is freed with the last of them.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import torch

from ...torch_facts.gpu import is_nvidia
from ...torch_facts.private_names import is_in_use

logger = logging.getLogger(__name__)

_trims = 0
_ROUNDING = 64 << 20  # the driver rounds each allocation up to 2 MiB
_RESERVED_NOW = 2  # CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT


def trims() -> int:
    """How often memory of living graphs was released. A graph maps it again at its next launch."""
    return _trims


def is_trimmable() -> bool:
    """True if the memory of graphs can be released while they live, because it belongs to the driver."""
    return _on_nvidia() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def _on_nvidia() -> bool:
    return is_nvidia("cuda") and torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def driver_graph_bytes(device: int) -> int:
    """Bytes of a device that the driver holds for graphs now; 0 if that is unknown."""
    held = ctypes.c_uint64(0)
    try:
        answer = _driver().cuDeviceGetGraphMemAttribute(ctypes.c_int(device), _RESERVED_NOW, ctypes.byref(held))
    except (OSError, AttributeError) as error:
        logger.debug("the driver does not say what graphs hold: %s", error)
        return 0
    return held.value if answer == 0 else 0


def release_graph_memory() -> None:
    """Free graph memory that no graph uses now, on every device that this process uses: to ask another one would take
    half a GiB there. Does nothing without an NVIDIA driver in use.
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
    """Bytes that a graph may take whose run allocates `needed` bytes."""
    return needed + needed // 8 + _ROUNDING


def make_room(device: int, needed: int, spare: int = 0) -> None:
    """Leave memory to the driver, which maps that of a graph at its first launch: enough for a run that allocates
    `needed` bytes, and `spare` bytes more.

    The driver cannot ask others for memory: torch's allocator keeps what it once had, and ComfyUI's pages of weights
    take what is free. Both give way to an ordinary allocation. They must do so now: unloading pages waits for the GPU,
    which ends a capture. Raises torch's OutOfMemoryError.
    """
    torch.cuda.empty_cache()
    torch.empty(room_for(needed) + spare, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.empty_cache()


def map_memory(graph: torch.cuda.CUDAGraph) -> None:
    """Let the driver map the memory of a recorded graph now, on the current stream. Nothing is computed.

    Otherwise the first launch does that. Where the driver or torch has no function for it, launch once.
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
