"""A fake program and fake graphs, for tests of GraphCache with small CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compile_cache.backends.base import Call, Capabilities, CaptureFacts, Code, Program
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import Runs
from compile_cache.config import CacheConfig
from compile_cache.errors import BypassCode, BypassReason
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec

MIB = 1024 * 1024
BUDGET = 10 * MIB
FULL = Capabilities(available=True, compiles=True, captures=True)
GRADIENT = BypassReason(BypassCode.GRADIENT, "gradients are on")
OBSERVED = BypassReason(BypassCode.OBSERVED_INPUT, "another node patches the model")
COUNTED = ("captures", "replays", "graph_calls", "eager_calls")


def oom() -> Exception:
    return torch.cuda.OutOfMemoryError("out of memory")


class FakeGraph:
    """Computes what the module computed at its capture, so that a stale graph gives a wrong result."""

    def __init__(self, forward: Callable[..., Any], size: int) -> None:
        self.bytes = size
        self.closed = 0
        self.failure: BaseException | None = None
        self._forward = forward

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        assert not self.closed, "a closed graph was replayed"
        if self.failure is not None:
            raise self.failure
        return self._forward(*tensors)

    def close(self) -> None:
        self.closed += 1


@dataclass(eq=False)
class Module:
    """A forward that multiplies. `factor` stands for the weights, `epoch` for the weights epoch."""

    factor: float = 2.0
    epoch: int = 1
    failure: BaseException | None = None
    calls: int = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return x * self.factor

    def load(self, factor: float) -> None:
        """Load new weights at new addresses."""
        self.factor, self.epoch = factor, self.epoch + 1

    def call(self, side: int = 8, **changes: Any) -> Call:
        signature = Signature((("latent", TensorSpec((1, 4, side, side), "float32", "cpu")),))
        call = Call(
            key=GraphKey(signature, Role.UNET, "model" * 8, "fake"),
            tensors=[torch.full((1, 4, side, side), 3.0)],
            invoke=lambda tensors: self.forward(*tensors),
            device="cpu",
            epoch=self.epoch,
        )
        return replace(call, **changes)


class FakeProgram(Program):
    """code: of the regions of its calls; runs show what they lack. is_mixed: compiled code runs beside originals.
    comparisons: calls that compared code that came.
    """

    def __init__(self, owner: int = 1, capabilities: Capabilities = FULL, size: int = 4 * MIB) -> None:
        super().__init__(owner, capabilities)
        self.size = size
        self.graphs: list[FakeGraph] = []
        self.run_failures: list[BaseException] = []
        self.capture_failure: BaseException | None = None
        self.capture_attempts = 0
        self.code, self.is_mixed, self.comparisons = Code.READY, False, 0
        self._lacking, self._ran = set[GraphKey](), set[GraphKey]()

    def code_of(self, key: GraphKey) -> Code:
        return self.code if key in self._lacking else Code.READY

    def has_run(self, key: GraphKey) -> bool:
        return key in self._ran

    def run(self, call: Call) -> Any:
        if self.run_failures:
            raise self.run_failures.pop(0)
        self.ran_originals = self.code is not Code.READY and call.policy.runs is not Runs.ORIGINALS
        self.ran_compiled = call.policy.runs is not Runs.ORIGINALS and (self.is_mixed or not self.ran_originals)
        self._ran.add(call.key)
        (self._lacking.add if self.ran_originals else self._lacking.discard)(call.key)
        return call.invoke(call.tensors)

    def compare(self, call: Call) -> Any:
        self.comparisons += 1
        self.ran_originals, self.ran_compiled = True, self.is_mixed
        return call.invoke(call.tensors)

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> FakeGraph:
        self.capture_attempts += 1
        assert torch.equal(result, call.invoke(call.tensors)), "`capture` must get the result of the run before it"
        if self.capture_failure is not None:
            raise self.capture_failure
        factor = float(call.invoke([torch.ones(1)]))
        graph = FakeGraph(lambda x: x * factor, self.size)
        self.graphs.append(graph)
        return graph

    @property
    def open_graphs(self) -> int:
        return sum(not graph.closed for graph in self.graphs)


@dataclass
class StoppingProgress:
    """A Progress whose user has pressed Cancel."""

    cancellations = (InterruptedError,)
    presses: Iterator[bool] = field(default_factory=lambda: itertools.chain([True], itertools.repeat(False)))

    def raise_if_cancelled(self) -> None:
        if next(self.presses):
            raise InterruptedError("cancelled")

    def begin_block(self) -> None: ...

    def prompt_runs(self) -> bool:
        return False

    def cancel_again(self) -> None: ...

    def report(self, done: int, total: int) -> None: ...


@contextmanager
def session(cache: GraphCache, owner: int) -> Iterator[None]:
    """A sampling run."""
    cache.open_session(owner)
    try:
        yield
    finally:
        cache.close_session(owner)


@contextmanager
def expect(cache: GraphCache, bypasses: dict[str, int] | None = None, **counts: int) -> Iterator[None]:
    """Assert that the block adds exactly these counts and bypasses; all other counters must stay the same."""
    before = cache.stats.snapshot()
    yield
    after = cache.stats.snapshot()
    assert {name: after[name] - before[name] for name in COUNTED} == {name: counts.get(name, 0) for name in COUNTED}
    added = {code: n - before["bypasses"].get(code, 0) for code, n in after["bypasses"].items()}
    assert {code: n for code, n in added.items() if n} == (bypasses or {})


def answer(result: torch.Tensor) -> float:
    """The factor that computed the result."""
    return float(result.flatten()[0]) / 3.0


class Rig:
    """Calls of one module through a cache."""

    def __init__(self, cache: GraphCache | None = None, program: FakeProgram | None = None) -> None:
        self.cache = cache or GraphCache(CacheConfig(budget_bytes=BUDGET))
        self.program, self.module = program or FakeProgram(), Module()

    def run(self, *side: int, times: int = 1, **changes: Any) -> float:
        """The factor that answered; of several times the same."""
        found = {answer(self.cache.run(self.program, self.module.call(*side, **changes))) for _ in range(times)}
        assert len(found) == 1
        return found.pop()

    def expect(self, bypasses: dict[str, int] | None = None, **counts: int) -> AbstractContextManager[None]:
        return expect(self.cache, bypasses, **counts)

    def session(self) -> AbstractContextManager[None]:
        return session(self.cache, self.program.owner)
