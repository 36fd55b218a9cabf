"""Capture a forward as a CUDA graph, on every allocator that ComfyUI may have chosen.

Inputs and outputs live in ordinary memory, allocated before the capture; what the forward allocates inside is given
back inside. So a replay owns nothing between two runs, graphs may share their memory, and under cudaMallocAsync
(ComfyUI's default) no allocation node of the graph outlives it.
"""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...errors import CaptureError, first_line
from ..base import Call

logger = logging.getLogger(__name__)

Invoke = Callable[[Sequence[torch.Tensor]], Any]


def _keep_for_good(error: BaseException) -> None:
    """Never free what a broken capture allocated; the frames of its error hold it.

    Freeing such memory under cudaMallocAsync ends the process, from a destructor where nothing can catch it. A list
    would be emptied when the interpreter ends; a reference that nobody owns is not.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


class CapturedGraph:
    """One captured forward. Single-threaded: the cache's lock guards capture and replay."""

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
        torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()
        # A tensor that the original hands out twice (ControlNet residuals, scaled in place) is handed out twice here.
        copies = {id(leaf): leaf.clone() for leaf in self._outputs if isinstance(leaf, torch.Tensor)}
        results = [copies.get(id(leaf), leaf) for leaf in self._outputs]
        return pytree.tree_unflatten(results, self._spec)

    def close(self) -> None:
        self._graph.reset()
        self._inputs, self._outputs = [], []


class _Pools:
    """One memory pool per device for all captures: they never run at the same time, so they may share it.

    torch forgets a pool when its last graph dies and then fails on its handle, so a tiny graph anchors each one.
    """

    def __init__(self) -> None:
        self._anchors: dict[int, torch.cuda.CUDAGraph] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def stream(self, device: int) -> torch.cuda.Stream:
        """The stream on which all captures of a device are made."""
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

    Each form of call is rehearsed once: the same tensors by name and the same plain values run the same Python, and
    another shape of them only launches other sizes.
    """

    def __init__(self) -> None:
        self._rehearsed: set[Any] = set()

    def capture(self, call: Call, result: Any) -> CapturedGraph:
        """Capture a call that ran once right before and gave `result`. Raises CaptureError."""
        signature = call.key.signature
        form = (tuple(name for name, _ in signature.tensors), repr(signature.values))
        graph = capture(call.invoke, call.tensors, result, rehearse=form not in self._rehearsed)
        self._rehearsed.add(form)
        return graph


def capture(invoke: Invoke, tensors: Sequence[torch.Tensor], result: Any, rehearse: bool = True) -> CapturedGraph:
    """Capture `invoke(tensors)`, which ran once right before and gave `result`: every kernel is compiled and loaded.

    Raises CaptureError with the cause; whatever was half made is abandoned, and so it is when the user cancels.
    """
    device = tensors[0].device.index
    leaves, spec = pytree.tree_flatten(result)
    inputs = [tensor.clone() for tensor in tensors]
    copies = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    outputs = [copies.get(id(leaf), leaf) for leaf in leaves]
    stream = _pools.stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        if rehearse:
            _rehearse(invoke, inputs)
        pool = _pools.pool(device)
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
    """Run once more, on the stream of the capture, with every wait for the GPU turned into an error.

    Code that waits (`.item()`, a copy to the CPU) would break the capture, and under cudaMallocAsync the first
    temporary that is freed after that ends the process. It also lets cuBLAS make its workspace for this stream: made
    inside a capture, it would die with it.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        invoke(inputs)
    except Exception as error:
        raise CaptureError(f"the forward cannot be captured: {first_line(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _capture_on_current_stream(
    invoke: Invoke, inputs: list[torch.Tensor], outputs: list[Any], pool: Any
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # "thread_local", as core does: under the default another thread's CUDA call kills the capture.
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
        # Cancel, which ComfyUI's operations look for: nothing broke, so memory may go while it is still recorded.
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
