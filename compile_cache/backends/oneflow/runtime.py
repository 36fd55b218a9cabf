"""The one OneFlow of the process: it builds graphs, and knows when it must not build another.

Two things in OneFlow 0.9.0 decide how it is used (both measured). A plan that failed to compile leaves it in a state in
which the next one ends the process; so what a graph is made of runs eagerly first, where an error is an exception, and
after one failure nothing is built again. And a graph that goes gives no memory back, until the last one is gone and the
session is started anew; so what was built since then is bounded, whether it is still there or not.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import CaptureError, first_line
from .packages import oneflow

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
_MIB = 1024 * 1024


class Runtime:
    """Builds at most `most` graphs, and stops at `budget` bytes, counting those that are gone.

    Both counts begin again when the last graph is closed. There is one session in a process, and to start it anew
    under a graph that lives ends the process: so there is one of these too, see `runtime`.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self.most = most
        self.built = 0
        self.bytes = 0
        self.failure: str | None = None
        self._graphs: list[weakref.ref[Any]] = []
        self._open = 0

    def demand_room(self, budget: int) -> None:
        """Raises CaptureError where no graph may be built any more; cheap, so ask before anything else."""
        if self.failure is not None:
            raise CaptureError(
                f"OneFlow failed once in this process ({self.failure}) and could end it the next time, so it builds no "
                "more graphs. Restart ComfyUI to try again"
            )
        if self.built >= self.most or self.bytes >= budget:
            raise CaptureError(
                f"{self.built} OneFlow graphs with {self.bytes // _MIB} MiB were built, and the limit is {self.most} "
                f"graphs or {budget // _MIB} MiB: OneFlow gives memory back only when all are gone. This size runs "
                "without a graph. Use Free Graphs to start over, or raise RESOLUTE_BUDGET_MB"
            )

    def build(self, make: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """A compiled graph: `make()` gives a oneflow.nn.Graph, whose first call with `inputs` compiles it.

        Whoever takes it says `account` and in the end `closed`. Raises CaptureError; after that, nothing is built.
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
        self._graphs.append(weakref.ref(graph))
        self._open += 1
        return graph

    def account(self, size: int) -> None:
        """A graph that was built takes `size` bytes."""
        self.bytes += size

    def closed(self) -> None:
        """A graph was let go. With the last one the session starts anew, and all memory comes back."""
        self._open -= 1
        if self._open > 0 or self.failure is not None:
            return
        gc.collect()
        if any(graph() is not None for graph in self._graphs):
            logger.debug("a OneFlow graph is still held by somebody: its session goes on")
            return
        oneflow().framework.session_context.GetDefaultSession().Reset()
        _return_memory()
        self._graphs, self.built, self.bytes = [], 0, 0


@functools.cache
def runtime() -> Runtime:
    """The one of the process."""
    return Runtime()


def _return_memory() -> None:
    """Let the C library give what was freed back to the system: hundreds of megabytes of eager tensors, on the CPU."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def synchronize() -> None:
    """Wait until OneFlow has done what it was asked: it works in threads and streams of its own."""
    oneflow()._oneflow_internal.eager.Sync()


def wait_for_torch(tensors: Sequence[torch.Tensor]) -> None:
    """Let torch finish what OneFlow is about to read."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def memory_in_use(device: torch.device) -> int:
    """Bytes that are gone from a GPU, or that this process holds: OneFlow allocates outside torch's books."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
