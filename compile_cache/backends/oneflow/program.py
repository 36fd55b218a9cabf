"""A module on OneFlow: a graph for each signature, which lives in the shared GraphCache like any capture."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from ...errors import CaptureError
from ..base import Call, Capabilities
from ..eager import EagerProgram
from .packages import installed, oneflow
from .runtime import Runtime, memory_in_use, synchronize, wait_for_torch
from .weights import CopiedWeights, Weight, Weights, to_oneflow

# OneFlow 0.9.0 starts a graph and then notes that it did. One that is done before is taken off an empty queue, which
# corrupts memory: about one process in ten, for graphs of microseconds on a busy machine. Models take far longer.
LEAST_SECONDS = 0.02
_SURELY_LONG = 1.0
# What a result may differ from the original's, relatively, before a graph is refused: rounding in the order of sums.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Forward(Protocol):
    """A forward as OneFlow runs it, made by a compiler for one call. All lists hold OneFlow tensors."""

    weights: dict[str, Weight]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a call's tensors that the forward reads."""
        ...

    def run(self, inputs: Sequence[Any]) -> list[Any]: ...

    def module(self) -> Any:
        """A oneflow.nn.Module whose forward is `run` and whose parameters are `weights`."""
        ...

    def rebuilt(self, results: Sequence[torch.Tensor]) -> Any:
        """What the original returns, around `results`."""
        ...

    def release(self) -> None:
        """The graph is built: let go of what only that needs. `inputs`, `weights` and `rebuilt` stay."""
        ...


class Compiler(Protocol):
    name: str

    def compile(self, call: Call, module: torch.nn.Module, weights: Weights) -> Forward:
        """Raises CaptureError with what stands in the way. Has not compiled a plan yet."""
        ...


class OneFlowGraph:
    """One forward for one signature. Single-threaded: the cache's lock guards it."""

    def __init__(self, graph: Any, forward: Forward, call: Call, weights: Weights, size: int) -> None:
        assert call.module is not None
        self.bytes = size
        self._graph = graph
        self._forward: Forward | None = forward
        self._module = weakref.ref(call.module)
        self._weights = weights
        self._epoch = call.epoch
        self._copied: CopiedWeights | None = CopiedWeights(forward.weights, call.module)

    def refresh_weights(self, epoch: int) -> bool:
        """Whether it can still compute with the module's present weights."""
        if epoch == self._epoch:
            return True
        module = self._module()
        if module is None or self._forward is None or not self._weights.refresh(self._forward.weights, module):
            return False
        self._copied = CopiedWeights(self._forward.weights, module)
        self._epoch = epoch
        return True

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        forward, copied = self._forward, self._copied
        assert forward is not None, "replayed after close"
        assert copied is not None, "replayed after close"
        wait_for_torch(tensors)
        with oneflow().no_grad():
            copied.refresh()
            results = self._graph(*map(to_oneflow, forward.inputs(tensors)))
        return forward.rebuilt(_to_torch(results))

    def close(self) -> None:
        """Let the weights go. The graph's own memory stays OneFlow's."""
        self._graph, self._forward, self._copied = None, None, None


class OneFlowProgram(EagerProgram):
    """The first call of a signature runs the original; its graph is built right after, and checked against it."""

    def __init__(
        self, owner: int, capabilities: Capabilities, compiler: Compiler, runtime: Runtime, budget: int
    ) -> None:
        super().__init__(owner, capabilities)
        self._budget = budget
        self._compiler = compiler
        self._runtime = runtime
        self._weights = Weights()

    def capture(self, call: Call, result: Any) -> OneFlowGraph:
        """Raises CaptureError, never ends the process: what fails eagerly never becomes a plan."""
        self._runtime.demand_room(self._budget)
        if call.module is None:
            raise CaptureError("the call does not say which module it belongs to")
        _demand_dtypes(call, call.module)
        device = call.tensors[0].device
        oneflow()  # importing it is no part of a graph's memory
        before = memory_in_use(device)
        forward = self._compiler.compile(call, call.module, self._weights)
        call.progress.raise_if_cancelled()
        inputs = self._check(call, forward, result)
        call.progress.raise_if_cancelled()
        graph = self._runtime.build(lambda: _graph_of(forward), inputs)
        forward.release()
        size = max(memory_in_use(device) - before, sum(tensor.nbytes for tensor in call.tensors))
        self._runtime.account(size)
        made = OneFlowGraph(graph, forward, call, self._weights, size)
        _demand_equal(made.replay(call.tensors), result, "its graph")
        return made

    def _check(self, call: Call, forward: Forward, result: Any) -> list[Any]:
        """Run every operator eagerly on the call's own tensors: what OneFlow lacks is an exception here."""
        wait_for_torch(call.tensors)
        inputs = [to_oneflow(tensor) for tensor in forward.inputs(call.tensors)]
        results, seconds = _timed(forward, inputs)
        _demand_equal(forward.rebuilt(_to_torch(results)), result, "OneFlow")
        if seconds < _SURELY_LONG:  # the first time something runs takes longer
            seconds = _timed(forward, inputs)[1]
        if seconds < LEAST_SECONDS:
            raise CaptureError(
                f"the forward takes {seconds * 1000:.1f} ms, and OneFlow {installed().oneflow} may crash on a graph "
                f"that is done within {LEAST_SECONDS * 1000:.0f} ms; it gains nothing there either"
            )
        return inputs


def _timed(forward: Forward, inputs: Sequence[Any]) -> tuple[list[Any], float]:
    started = time.perf_counter()
    with oneflow().no_grad():
        results = forward.run(inputs)
    synchronize()
    return results, time.perf_counter() - started


def _graph_of(forward: Forward) -> Any:
    """A oneflow.nn.Graph, made here because its class exists only once OneFlow is imported."""

    class ForwardGraph(oneflow().nn.Graph):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.forward_module = forward.module()

        def build(self, *inputs: Any) -> Any:
            return self.forward_module(*inputs)

    return ForwardGraph()


def _to_torch(results: Sequence[Any]) -> list[torch.Tensor]:
    """Copies of the results: a graph uses its output memory again."""
    synchronize()
    return [oneflow().utils.tensor.to_torch(result).clone() for result in results]


def _demand_dtypes(call: Call, module: torch.nn.Module) -> None:
    """OneFlow's CPU kernels are for float32: another dtype would fail in a plan, which cannot be taken back."""
    if call.tensors[0].device.type != "cpu":
        return
    halves = {tensor.dtype for tensor in (*call.tensors, *module.parameters())} & {torch.float16, torch.bfloat16}
    if halves:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in halves))
        raise CaptureError(
            f"OneFlow computes in float32 only on the CPU, and this model is in {names}; start ComfyUI with "
            "--force-fp32"
        )


def _demand_equal(actual: Any, expected: Any, what: str) -> None:
    """Compare with the original's result. Raises CaptureError, so that a wrong graph is never used."""
    mine, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    for one, other in zip(mine, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise CaptureError(f"{what} answers {tuple(one.shape)} {one.dtype} for {tuple(other.shape)} {other.dtype}")
        norm = float(other.double().norm())
        error = float((one.double() - other.double()).norm()) / (norm or 1.0)
        if not error <= _TOLERANCE.get(other.dtype, 0.0):
            raise CaptureError(f"{what} is {error:.1e} away from the original's result")
