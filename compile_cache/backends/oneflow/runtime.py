"""The one OneFlow of the process: it builds graphs, and knows when it must not build another.

Three things in OneFlow 0.9.0 decide how it is used (all measured). A plan that failed to compile leaves it in a state
in which the next one ends the process; so what a graph is made of runs eagerly first, where an error is an exception,
and after one failure nothing is built again. A graph that goes gives no memory back; so what was ever built is bounded,
whether it is still there or not. And the one thing that would give memory back, to start OneFlow's session anew, ends
the process if a graph is still being taken down, which happens in a thread of OneFlow's that nobody can wait for; so
the session is never started anew.
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

MOST_GRAPHS = 32
_MIB = 1024 * 1024


class Runtime:
    """Builds at most `most` graphs, and stops at `budget` bytes; `built` and `bytes` count those that are gone too.

    There is one of them in a process, see `runtime`.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self.most = most
        self.built = 0
        self.bytes = 0
        self.failure: str | None = None

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
                f"graphs or {budget // _MIB} MiB: OneFlow never gives a graph's memory back. This size runs without a "
                "graph. Restart ComfyUI to start over, or raise RESOLUTE_BUDGET_MB"
            )

    def build(self, make: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """A compiled graph: `make()` gives a oneflow.nn.Graph, whose first call with `inputs` compiles it.

        Whoever takes it tells its size to `account`. Raises CaptureError; after that, nothing is built.
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

    def account(self, size: int) -> None:
        """A graph that was built takes `size` bytes, for good."""
        self.bytes += size


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
