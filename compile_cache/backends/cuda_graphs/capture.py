"""Capture a forward as a CUDA graph, under torch's own allocator and under cudaMallocAsync, ComfyUI's default.

Static inputs and outputs are in ordinary memory, allocated before the capture. Memory that the forward allocates inside
the capture is also freed inside it. So between replays a graph needs no memory of its own, all graphs of a device share
one pool, and under cudaMallocAsync no allocation node outlives its graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from ...errors import CaptureError, NoGainError, OverBudgetError, first_line
from ...torch_compat.private_names import Feature, foreach_copy, pytree, why_unavailable
from ...tuning.stopwatch import cost_of_run
from ..base import Call, CaptureFacts
from . import kernel_memory, pools
from .broken import abandon, clear_frames, leak_tensors
from .foreign_launches import UnsafeLaunchError, launches_by_address
from .host_constants import HostConstants, Run, require_one_device
from .kept_tensors import forbid_retained_reads, restore_attributes
from .memory import make_room, map_memory, trim_count
from .sync_check import waits_of

logger = logging.getLogger(__name__)

Invoke = Callable[[Sequence[torch.Tensor]], Any]


class CapturedGraph:
    """One captured forward. Not thread-safe: the cache's lock guards capture and replay.

    inputs, outputs: the static buffers; leaves of the result that are not tensors are returned unchanged.
    kept: copies from `constants` that the graph reads, see `host_constants`. `bytes` counts inputs, outputs and kept
    alone: all graphs of a device share the pool in which a replay allocates (`pools`). device: the device's number.
    peak: bytes that a replay allocates in the pool. uncaptured_seconds: duration of the rehearsal; 0.0 without one.
    """

    uncaptured_seconds = 0.0

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[torch.Tensor],
        outputs: list[Any],
        spec: pytree.TreeSpec,
        device: int,
        peak: int,
        kept: Sequence[torch.Tensor],
        constants: HostConstants | None,
    ) -> None:
        leaves = (*inputs, *outputs, *kept)
        self.bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.constants = constants
        self._kept = list(kept)
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._device, self._peak = device, peak
        self._trims = trim_count()
        self._inputs = inputs
        self._outputs = outputs
        self._spec = spec

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        assert self._graph is not None, "a closed graph is replayed"
        if self._trims != trim_count():  # the launch maps its memory again
            make_room(self._device, self._peak)
            self._trims = trim_count()
        foreach_copy(self._inputs, list(tensors))
        self._graph.replay()
        # The original may return one tensor twice (ControlNet's residuals, scaled in place): return one clone twice.
        copies = {id(leaf): leaf.clone() for leaf in self._outputs if isinstance(leaf, torch.Tensor)}
        results = [copies.get(id(leaf), leaf) for leaf in self._outputs]
        return pytree.tree_unflatten(results, self._spec)

    def close(self) -> None:
        if self._graph is None:
            return
        self._graph.reset()
        self._graph, self._inputs, self._outputs, self._kept = None, [], [], []
        pools.shared.closed(self._device)


class Recorder:
    """Captures the calls of one program.

    Calls with the same tensor names, plain values and variant run the same code at any shapes. So only the first of
    these is rehearsed; with quantized weights every call is, because comfy-kitchen tunes and allocates by shape.
    variant: identifies the compiled code that runs in the call.
    """

    def __init__(self) -> None:
        self._rehearsed: dict[Any, HostConstants | None] = {}

    def capture(self, call: Call, result: Any, facts: CaptureFacts, variant: Hashable = ()) -> CapturedGraph:
        """See `Program.capture`."""
        signature = call.key.signature
        form = (tuple(name for name, _ in signature.tensors), repr(signature.values), variant)
        constants = self._rehearsed.get(form)
        rehearse = form not in self._rehearsed or kernel_memory.has_quantized(call.module)
        graph = capture(call.invoke, call.tensors, result, facts, rehearse, call.module, constants)
        self._rehearsed[form] = graph.constants
        return graph


def capture(
    invoke: Invoke,
    tensors: Sequence[torch.Tensor],
    result: Any,
    facts: CaptureFacts = CaptureFacts(),  # noqa: B008 (it is frozen)
    rehearse: bool = True,
    module: torch.nn.Module | None = None,
    constants: HostConstants | None = None,
) -> CapturedGraph:
    """Capture `invoke(tensors)`, which has just run and returned `result`, so that every kernel is compiled and loaded.

    rehearse: run once more on the capture's stream first, see `_rehearse`. constants: those of an earlier call that ran
    the same code. Raises CaptureError with the cause, NoGainError, OverBudgetError, and cancellations; in each case the
    unfinished graph is dropped.
    """
    _require_gain(facts.host_share, facts)
    require_one_device(tensors)
    device = tensors[0].device.index
    leaves, spec = pytree.tree_flatten(result)
    inputs = [tensor.clone() for tensor in tensors]
    copies = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    outputs = [copies.get(id(leaf), leaf) for leaf in leaves]
    with _on_capture_stream(device):
        if kernel_memory.has_int8_products(module):
            kernel_memory.claim(device)
        peak, rehearsed, seconds = facts.peak, None, 0.0
        if rehearse or peak > facts.limit:
            with cost_of_run(f"cuda:{device}") as cost:
                constants, rehearsed = _rehearse(invoke, inputs, module)  # `rehearsed` keeps the copies until then
            _require_gain(cost.host_share(), facts)
            peak, seconds = cost.bytes, cost.seconds()
        if peak > facts.limit:
            raise OverBudgetError(peak)
        pool = pools.shared.pool(device)
        make_room(device, peak, facts.spare)
        torch.cuda.synchronize(device)
        free_before = torch.cuda.mem_get_info(device)[0]
        graph, run = _capture_with_constants(_putting_back(invoke, module), inputs, outputs, pool, constants)
        map_memory(graph)
        torch.cuda.synchronize(device)
        growth = free_before - torch.cuda.mem_get_info(device)[0]
        logger.debug("captured: a run allocates %d MiB, the memory of graphs grew by %d MiB", peak >> 20, growth >> 20)
    del rehearsed
    pools.shared.opened(device, max(growth, 0))
    captured = CapturedGraph(graph, inputs, outputs, spec, device, peak, list(run.used.values()), constants)
    captured.uncaptured_seconds = seconds
    return captured


@contextlib.contextmanager
def _on_capture_stream(device: int) -> Iterator[None]:
    """Switch to the stream of captures. At the end the caller's stream waits for it, also after an error: a rehearsal
    that still runs would write to memory that was returned to the allocator.
    """
    stream = pools.shared.stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def _require_gain(host_share: float, facts: CaptureFacts) -> None:
    if host_share < facts.least_host_share:
        raise NoGainError(host_share)


def _rehearse(
    invoke: Invoke, inputs: list[torch.Tensor], module: torch.nn.Module | None
) -> tuple[HostConstants | None, Run]:
    """Run on the capture's stream. Returns the host constants (None if not needed) and the run that made them. Raises
    CaptureError if the forward waits for the GPU, or keeps a tensor for a later call.

    Code that waits (`.item()`, a copy to the CPU) would break the capture, and under cudaMallocAsync the process ends
    as soon as a tensor of a broken capture is freed. The run also makes cuBLAS allocate its workspace for this stream:
    a workspace allocated inside the capture would be freed with the graph.

    A forward that waits only to copy values it made on the host can be captured: the values are copied beforehand. Two
    more runs check this: one makes the copies, and one uses them and must not wait.
    """
    with forbid_retained_reads(module):
        waits = waits_of(functools.partial(_run, invoke, inputs))
    if not waits:
        return None, Run()
    made = Run()
    if not why_unavailable(Feature.HOST_VALUES):
        constants = HostConstants(module)
        with constants.observed(inputs, makes=True) as made:
            _run(invoke, inputs)
    if made.used:
        with constants.observed(inputs) as run:
            waits = waits_of(functools.partial(_run, invoke, inputs))
        _require_constant(run)
    if waits:
        raise CaptureError(f"the forward cannot be captured: it waits for the GPU at {waits[0]}")
    return constants, made


def _run(invoke: Invoke, inputs: list[torch.Tensor]) -> None:
    try:
        _leaves_of(invoke, inputs)
    except (Exception, UnsafeLaunchError) as error:
        raise CaptureError(f"the forward cannot be captured: {first_line(error)}") from error


def _leaves_of(invoke: Invoke, inputs: list[torch.Tensor]) -> list[Any]:
    """The leaves of the result. A separate frame, so that an error raised after the call does not keep them alive."""
    with launches_by_address():
        leaves: list[Any] = pytree.tree_flatten(invoke(inputs))[0]
    return leaves


def _require_constant(run: Run) -> None:
    if run.missing:
        shape, dtype = tuple(run.missing[0][1].shape), run.missing[0][1].dtype
        raise CaptureError(
            f"the forward cannot be captured: it makes a tensor of shape {shape} and type {dtype} on the host, which "
            "differs between two runs of one call"
        )
    if run.has_foreign:
        raise CaptureError("the forward cannot be captured: it copies a host tensor to the GPU that it did not make")


def _capture_with_constants(
    invoke: Invoke, inputs: list[torch.Tensor], outputs: list[Any], pool: Any, constants: HostConstants | None
) -> tuple[torch.cuda.CUDAGraph, Run]:
    """Capture with copies in place of the values that the forward makes on the host, see `host_constants`.

    At shapes that were not rehearsed, the capture itself reveals values without a copy. Then we drop that graph without
    a launch, copy the values, and capture again.
    """
    if constants is None:
        return _capture_on_current_stream(invoke, inputs, outputs, pool), Run()
    held: list[torch.Tensor] = []
    for attempt in range(2):
        runs: list[Run] = []
        graph = _capture_on_current_stream(_observed(invoke, constants, runs), inputs, outputs, pool)
        run = runs[0]
        if not run.missing and not run.has_foreign:
            return graph, run
        graph.reset()
        if attempt or run.has_foreign:
            _require_constant(run)
        held += constants.add(run.missing)
    raise AssertionError("a capture with all constants was dropped")


def _putting_back(invoke: Invoke, module: torch.nn.Module | None) -> Invoke:
    def run(tensors: Sequence[torch.Tensor]) -> Any:
        with restore_attributes(module):
            return invoke(tensors)

    return run


def _observed(invoke: Invoke, constants: HostConstants, runs: list[Run]) -> Invoke:
    def observed(tensors: Sequence[torch.Tensor]) -> Any:
        with constants.observed(tensors, is_capturing=True) as run:
            runs.append(run)
            return invoke(tensors)

    return observed


def _capture_on_current_stream(
    invoke: Invoke, inputs: list[torch.Tensor], outputs: list[Any], pool: Any
) -> torch.cuda.CUDAGraph:
    graph, device = torch.cuda.CUDAGraph(), inputs[0].device.index
    # "thread_local", as ComfyUI does: with the default, a CUDA call of another thread breaks the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results = _leaves_of(invoke, inputs)
        for target, result in zip(outputs, results, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(result)
        del results, result
        graph.capture_end()
    except Exception as error:
        leak_tensors(error)
        abandon(graph, device, pool)
        raise CaptureError(f"{type(error).__name__}: {first_line(error)}") from error
    except BaseException as error:
        # A cancellation, for which ComfyUI's operations check, or a refused launch. The capture is intact: free its
        # tensors while it is still open.
        clear_frames(error)
        abandon(graph, device, pool)
        if isinstance(error, UnsafeLaunchError):
            raise CaptureError(f"the forward cannot be captured: {error}") from error
        raise
    return graph
