"""Runs a module on OneFlow: one graph per signature, cached in the shared GraphCache like any capture."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import CaptureError
from ...torch_compat.private_names import pytree
from ..base import Call, Capabilities, CaptureFacts
from ..eager import EagerProgram
from .forward import Compiler, Forward, Structure
from .packages import installed, oneflow
from .runtime import Runtime, memory_in_use, synchronize, wait_for_torch
from .weights import CopiedWeights, SharedWeights, to_oneflow

# OneFlow 0.9.0 launches a graph before it enqueues the entry that the finished graph pops. A graph that finishes first
# pops an empty queue, which corrupts memory: about one process in ten crashed, with graphs of microseconds on a busy
# machine. Real models take far longer.
MIN_SECONDS = 0.02
_LONG_SECONDS = 1.0  # a first run that takes longer needs no second measurement
# Largest relative error of a graph's result: another order of summation changes the rounding.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class OneFlowGraph:
    """A built graph for one signature. Not thread-safe: the cache's lock guards it."""

    def __init__(
        self, graph: Any, forward: Forward, structure: Structure, call: Call, weights: SharedWeights, size: int
    ) -> None:
        assert call.module is not None
        self.bytes = size
        self._graph = graph
        self._forward: Forward | None = forward
        self._structure = structure
        self._module = weakref.ref(call.module)
        self._weights = weights
        self._epoch = call.epoch
        self._copied: CopiedWeights | None = CopiedWeights(forward.weights, call.module)

    def refresh_weights(self, epoch: int) -> bool:
        """Return True if the graph can use the module's current weights; see `Capabilities.keeps_graphs`."""
        if epoch == self._epoch:
            return True
        module = self._module()
        if module is None or self._forward is None or not self._weights.refresh(self._forward.weights, module):
            return False
        self._copied = CopiedWeights(self._forward.weights, module)
        self._epoch = epoch
        return True

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        assert self._forward is not None, "replayed after close"
        assert self._copied is not None, "replayed after close"
        wait_for_torch(tensors)
        with oneflow().no_grad():
            self._copied.refresh()
            results = self._graph(*(to_oneflow(tensors[index]) for index in self._forward.inputs))
        return self._structure.build(_to_torch(results))

    def close(self) -> None:
        """Release the weights. OneFlow never frees the graph's own memory."""
        self._graph, self._forward, self._copied = None, None, None


class OneFlowProgram(EagerProgram):
    """The first call of a signature runs the original; then its graph is built and checked against that result."""

    def __init__(
        self, owner: int, capabilities: Capabilities, compiler: Compiler, runtime: Runtime, budget: int
    ) -> None:
        super().__init__(owner, capabilities)
        self._budget = budget
        self._compiler = compiler
        self._runtime = runtime
        self._weights = SharedWeights()

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> OneFlowGraph:
        """Build and verify a graph. Runs eagerly first: an error in a plan may end the process. Raises CaptureError."""
        self._runtime.require_room(self._budget)
        if call.module is None:
            raise CaptureError("the call does not say which module it belongs to")
        _require_float32_on_cpu(call, call.module)
        device = call.tensors[0].device
        oneflow()  # import it before measuring: the import's memory is not the graph's
        before = memory_in_use(device)
        forward, structure = self._compiler.compile(call, call.module, self._weights), Structure(result)
        call.progress.raise_if_cancelled()
        inputs = self._check(call, forward, structure, result)
        call.progress.raise_if_cancelled()
        graph = self._runtime.build(lambda: forward.make_graph(structure), inputs)
        forward.release()
        size = max(memory_in_use(device) - before, sum(tensor.nbytes for tensor in call.tensors))
        self._runtime.bytes += size
        built = OneFlowGraph(graph, forward, structure, call, self._weights, size)
        _require_equal(built.replay(call.tensors), result, "its graph")
        return built

    def _check(self, call: Call, forward: Forward, structure: Structure, result: Any) -> list[Any]:
        """Run every operator eagerly, where an unsupported one is an exception. Returns the call's OneFlow inputs."""
        wait_for_torch(call.tensors)
        inputs = [to_oneflow(call.tensors[index]) for index in forward.inputs]
        results, seconds = _timed(forward, inputs)
        _require_equal(structure.build(_to_torch(structure.tensors(results))), result, "OneFlow")
        if seconds < _LONG_SECONDS:  # the first run includes warm-up, so measure again
            seconds = _timed(forward, inputs)[1]
        if seconds < MIN_SECONDS:
            raise CaptureError(
                f"the forward takes {seconds * 1000:.1f} ms, and OneFlow {installed().oneflow} may crash on a graph "
                f"that finishes within {MIN_SECONDS * 1000:.0f} ms; a graph would not be faster there either"
            )
        return inputs


def _timed(forward: Forward, inputs: Sequence[Any]) -> tuple[list[Any], float]:
    started = time.perf_counter()
    with oneflow().no_grad():
        results = forward.run(inputs, forward.values)
    synchronize()
    return results, time.perf_counter() - started


def _to_torch(results: Sequence[Any]) -> list[torch.Tensor]:
    """Torch copies of the results, because a graph reuses its output memory."""
    synchronize()
    return [oneflow().utils.tensor.to_torch(result).clone() for result in results]


def _require_float32_on_cpu(call: Call, module: torch.nn.Module) -> None:
    """Raise CaptureError for half precision on the CPU: OneFlow has no such kernels, and a failed plan is final."""
    if call.tensors[0].device.type != "cpu":
        return
    halves = {tensor.dtype for tensor in (*call.tensors, *module.parameters())} & {torch.float16, torch.bfloat16}
    if halves:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in halves))
        raise CaptureError(
            f"OneFlow supports only float32 on the CPU, and this model is in {names}; start ComfyUI with --force-fp32"
        )


def _require_equal(actual: Any, expected: Any, what: str) -> None:
    """Raise CaptureError if a tensor differs from the original's result, so that no wrong graph is ever used."""
    for ours, original in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        if not isinstance(original, torch.Tensor):
            continue
        if ours.shape != original.shape or ours.dtype != original.dtype:
            raise CaptureError(
                f"{what} returns {tuple(ours.shape)} {ours.dtype} instead of {tuple(original.shape)} {original.dtype}"
            )
        norm = float(original.double().norm())
        error = float((ours.double() - original.double()).norm()) / (norm or 1.0)
        if not error <= _TOLERANCE.get(original.dtype, 0.0):
            raise CaptureError(f"{what} differs from the original's result by {error:.1e} (relative)")
