"""Capture a forward as a CUDA graph, with torch's own allocator and with cudaMallocAsync, ComfyUI's default.

Inputs and outputs are in ordinary memory, allocated before the capture. Memory that the forward allocates inside the
capture is also freed inside. So between replays a graph holds no memory of its own, all graphs of a device share one
pool, and under cudaMallocAsync no allocation node outlives its graph.
"""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import CaptureError, OverBudgetError, first_line
from ...torch_private import foreach_copy, pytree
from ..base import Call, CaptureMemory
from .memory import make_room, peak_of_run
from .sync_check import recorded_waits

logger = logging.getLogger(__name__)

Invoke = Callable[[Sequence[torch.Tensor]], Any]


def _keep_for_good(error: BaseException) -> None:
    """Leak the tensors of a broken capture, which the frames of its error hold.

    Under cudaMallocAsync, freeing memory of a broken capture ends the process, from a destructor where nothing can
    catch it. A list of errors would be emptied when the interpreter exits, so leak a reference instead.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


class CapturedGraph:
    """One captured forward. Not thread-safe: the cache's lock guards capture and replay.

    inputs, outputs: the static buffers; leaves of the result that are no tensors are returned as they are. size: bytes.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[torch.Tensor],
        outputs: list[Any],
        spec: pytree.TreeSpec,
        size: int,
    ) -> None:
        self.bytes = size
        self._graph = graph
        self._inputs = inputs
        self._outputs = outputs
        self._spec = spec

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        foreach_copy(self._inputs, list(tensors))
        self._graph.replay()
        # The original may return one tensor twice (ControlNet's residuals, which are scaled in place): do the same.
        copies = {id(leaf): leaf.clone() for leaf in self._outputs if isinstance(leaf, torch.Tensor)}
        results = [copies.get(id(leaf), leaf) for leaf in self._outputs]
        return pytree.tree_unflatten(results, self._spec)

    def close(self) -> None:
        self._graph.reset()
        self._inputs, self._outputs = [], []


class _Pools:
    """One memory pool per device for all graphs: no two of them run at the same time, so they can share it.

    torch deletes a pool with its last graph, and then a capture with the pool's handle fails. So a tiny graph on each
    device keeps the pool.
    """

    def __init__(self) -> None:
        self._anchors: dict[int, torch.cuda.CUDAGraph] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def stream(self, device: int) -> torch.cuda.Stream:
        """The stream of all captures on a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def pool(self, device: int) -> Any:
        if device not in self._anchors:
            anchor = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream(device)):
                anchor.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=f"cuda:{device}")
                anchor.capture_end()
            self._anchors[device] = anchor
        return self._anchors[device].pool()


_pools = _Pools()


class Recorder:
    """Captures the calls of one program.

    Calls with the same tensor names and the same plain values run the same Python code, whatever their shapes. So of
    these only the first is rehearsed.
    """

    def __init__(self) -> None:
        self._rehearsed: set[Any] = set()

    def capture(self, call: Call, result: Any, memory: CaptureMemory) -> CapturedGraph:
        """See `Program.capture`."""
        signature = call.key.signature
        form = (tuple(name for name, _ in signature.tensors), repr(signature.values))
        graph = capture(call.invoke, call.tensors, result, memory, rehearse=form not in self._rehearsed)
        self._rehearsed.add(form)
        return graph


def capture(
    invoke: Invoke,
    tensors: Sequence[torch.Tensor],
    result: Any,
    memory: CaptureMemory = CaptureMemory(),  # noqa: B008 (it is frozen)
    rehearse: bool = True,
) -> CapturedGraph:
    """Capture `invoke(tensors)`, which has just run and returned `result`, so that every kernel is compiled and loaded.

    rehearse: run once more on the stream of the capture first, see `_rehearse`. Raises CaptureError with the cause,
    OverBudgetError, and whatever cancels; in each case the unfinished graph is dropped.
    """
    device = tensors[0].device.index
    leaves, spec = pytree.tree_flatten(result)
    inputs = [tensor.clone() for tensor in tensors]
    copies = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    outputs = [copies.get(id(leaf), leaf) for leaf in leaves]
    stream = _pools.stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        peak = memory.peak
        if rehearse or peak > memory.limit:
            with peak_of_run(f"cuda:{device}") as measured:
                _rehearse(invoke, inputs)
            peak = measured.bytes
        if peak > memory.limit:
            raise OverBudgetError(peak)
        pool = _pools.pool(device)
        make_room(device, peak)
        torch.cuda.synchronize(device)
        free_before = torch.cuda.mem_get_info(device)[0]
        graph = _capture_on_current_stream(invoke, inputs, outputs, pool)
        graph.replay()  # the first launch maps the memory
        torch.cuda.synchronize(device)
        growth = free_before - torch.cuda.mem_get_info(device)[0]
    torch.cuda.current_stream(device).wait_stream(stream)
    static = sum(leaf.nbytes for leaf in (*inputs, *outputs) if isinstance(leaf, torch.Tensor))
    return CapturedGraph(graph, inputs, outputs, spec, max(growth, 0) + static)


def _rehearse(invoke: Invoke, inputs: list[torch.Tensor]) -> None:
    """Run on the stream of the capture. Raises CaptureError if anything waits for the GPU.

    Code that waits (`.item()`, a copy to the CPU) would break the capture, and under cudaMallocAsync the process ends
    as soon as a tensor of a broken capture is freed. The run also makes cuBLAS allocate its workspace for this stream:
    allocated inside the capture, it would be freed with the graph.
    """
    with recorded_waits() as waits:
        try:
            invoke(inputs)
        except Exception as error:
            raise CaptureError(f"the forward cannot be captured: {first_line(error)}") from error
    if waits:
        raise CaptureError(f"the forward cannot be captured: it waits for the GPU at {waits[0]}")


def _capture_on_current_stream(
    invoke: Invoke, inputs: list[torch.Tensor], outputs: list[Any], pool: Any
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # "thread_local", as ComfyUI does: with the default, a CUDA call of another thread breaks the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results, _ = pytree.tree_flatten(invoke(inputs))
        for target, result in zip(outputs, results, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(result)
        del results, result
        graph.capture_end()
    except Exception as error:
        _keep_for_good(error)
        _abandon(graph)
        raise CaptureError(f"{type(error).__name__}: {first_line(error)}") from error
    except BaseException as error:
        # A cancel, which ComfyUI's operations check for. The capture is intact: free its tensors while it still runs.
        traceback.clear_frames(error.__traceback__)
        _abandon(graph)
        raise
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError as error:
        _keep_for_good(error)
        logger.debug("the broken capture ended with: %s", first_line(error))
