"""Builds OneFlow graphs, and refuses if building another one is unsafe. There is one runtime per process.

Three limits of OneFlow 0.9.0 (all measured) decide how we use it:
- After one plan fails to compile, the next one ends the process. So every operator runs eagerly first, where an error
  is an exception, and after one failed plan we build no more graphs.
- A closed graph frees no memory. So the limits count every graph ever built.
- Only restarting OneFlow's session would free the memory, but that ends the process while a graph is being destroyed,
  which happens in a OneFlow thread that we cannot wait for. So we never restart the session.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import CaptureError, first_line
from .packages import oneflow

MAX_GRAPHS = 32
_MIB = 1024 * 1024


class Runtime:
    """Builds and counts graphs. `built` and `bytes` include closed graphs. Use the process's instance, `runtime()`."""

    def __init__(self, max_graphs: int = MAX_GRAPHS) -> None:
        self.max_graphs = max_graphs
        self.built = 0
        self.bytes = 0
        self.failure: str | None = None

    def require_room(self, budget: int) -> None:
        """Raise CaptureError if no further graph may be built. budget: limit in bytes. Cheap, so call it first."""
        if self.failure is not None:
            raise CaptureError(
                f"OneFlow failed once in this process ({self.failure}), and another failure could end it, so no more "
                "graphs are built. Restart ComfyUI to try again"
            )
        if self.built >= self.max_graphs or self.bytes >= budget:
            raise CaptureError(
                f"{self.built} OneFlow graphs with {self.bytes // _MIB} MiB were built, and the limit is "
                f"{self.max_graphs} graphs or {budget // _MIB} MiB: OneFlow never returns a graph's memory. This size "
                "runs without a graph. Restart ComfyUI to start over, or raise RESOLUTE_BUDGET_MB"
            )

    def build(self, make: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """Build a graph: `make()` returns a oneflow.nn.Graph, and its first call with `inputs` compiles it.

        The caller must add the graph's size to `bytes`. Raises CaptureError; after that, no further graph is built.
        """
        self.built += 1
        try:
            graph = make()
            graph(*inputs)
            synchronize()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            raise CaptureError(f"OneFlow could not compile its plan: {self.failure}") from error
        _return_memory()
        return graph


@functools.cache
def runtime() -> Runtime:
    """The runtime of this process."""
    return Runtime()


def _return_memory() -> None:
    """Make the C library return freed memory to the system; on the CPU, eager tensors free hundreds of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def synchronize() -> None:
    """Wait for OneFlow's own threads and streams."""
    oneflow()._oneflow_internal.eager.Sync()


def wait_for_torch(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for torch's current streams, which write what OneFlow is about to read."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def memory_in_use(device: torch.device) -> int:
    """Bytes in use on a GPU, or resident in this process for the CPU. OneFlow allocates outside torch's allocator."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
