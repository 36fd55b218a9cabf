"""Memory that runs out at any one allocation of a compile, of later calls, of a capture, of a replay and of a fault-in.

Each test fails the first allocation, then from a fresh start the second, and so on until none is left to fail.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_cache.backends.base import Call, Capabilities
from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs import pools
from compile_cache.backends.cudagraph import CudaGraphProgram
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec
from compile_cache.tuning.stopwatch import RunCost

from ..dynamic_vram.test_paged_weights import Compiled
from ..out_of_memory import Graph, OutOfMemoryAt, TorchWithoutCuda
from ..rig import TOLERANCE, Block, Bound, Rig, random, relative_error, seeded, tokens

_MOST = 400


def each_failure(attempt: Callable[[OutOfMemoryAt], None]) -> int:
    """Call `attempt` with the first allocation failing, the second, ... Returns how many there were."""
    for number in range(1, _MOST):
        failing = OutOfMemoryAt(number)
        attempt(failing)
        if not failing.failed:
            return number - 1
    raise AssertionError("it allocates without end")


def call_with(failing: OutOfMemoryAt, bound: Bound, count: int = 5) -> bool:
    """One call with a failing allocation. Returns whether it was answered; the answer is right, and nothing stays."""
    x = tokens(count)
    expected = bound.module(x)
    answered = True
    try:
        with failing:
            actual = bound(x)
        assert relative_error(actual, expected) <= TOLERANCE
        del actual
    except torch.OutOfMemoryError as error:  # ComfyUI's own, which frees models and says so
        answered = False
        assert str(failing.number) in str(error)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None, f"allocation {failing.number} keeps the input alive"
    return answered


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.long
def test_of_a_compile() -> None:
    answered = []

    def attempt(failing: OutOfMemoryAt) -> None:
        rig = Rig(InductorBackend(), workers=0)
        bound = rig.bind(seeded(Block))
        answered.append(call_with(failing, bound))
        # The next call compiles what is missing and runs it, and nothing is compiled twice for a lack of memory.
        assert bound.error(tokens()) <= TOLERANCE
        before = rig.cache.stats.snapshot()
        assert bound.error(tokens(9)) <= TOLERANCE
        after = rig.cache.stats.snapshot()
        assert after["region_calls"] == before["region_calls"] + 1
        assert after["region_compiles"] in (1, 2)
        assert after["compile_failures"] == 0

    count = each_failure(attempt)
    assert count > 10
    assert sum(answered) > count / 2


@pytest.mark.parametrize("count", [5, 9])
def test_of_a_later_call(rig: Rig, count: int) -> None:
    bound = rig.bind(seeded(Block))
    bound(tokens())

    def attempt(failing: OutOfMemoryAt) -> None:
        call_with(failing, bound, count)
        before = rig.cache.stats.snapshot()
        assert bound.error(tokens(count)) <= TOLERANCE
        after = rig.cache.stats.snapshot()
        assert after["region_compiles"] == before["region_compiles"]
        assert after["region_calls"] == before["region_calls"] + 1

    each_failure(attempt)


# --- captures ----------------------------------------------------------------------------------------------------


class Captured:
    """A module whose calls are captured, with graphs on the CPU."""

    def __init__(self) -> None:
        self.cache = GraphCache()
        self.weight = random(4, 4)
        self.program = CudaGraphProgram(1, Capabilities(available=True, captures=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh() + x

    def __call__(self, x: torch.Tensor) -> Any:
        signature = Signature((("latent", TensorSpec(tuple(x.shape), "float32", "cpu")),))
        key = GraphKey(signature, Role.UNET, "model", "cudagraph")
        call = Call(key, [x], invoke=lambda tensors: self.forward(tensors[0]), device="cpu", epoch=1)
        return self.cache.run(self.program, call)

    def check(self, seed: int) -> None:
        x = random(2, 5, 4, seed=seed)
        assert torch.equal(self(x), self.forward(x))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "torch", TorchWithoutCuda())
    monkeypatch.setattr(capturing, "waits_of", lambda run: run() or [])
    monkeypatch.setattr(pools, "torch", TorchWithoutCuda())
    monkeypatch.setattr(pools, "shared", pools.Pools())
    monkeypatch.setattr(capturing, "cost_of_run", lambda _: contextlib.nullcontext(RunCost()))
    monkeypatch.setattr(capturing, "make_room", lambda device, needed, spare: None)


@contextlib.contextmanager
def launches_too(failing: OutOfMemoryAt) -> Iterator[None]:
    Graph.failing = failing
    try:
        with failing:
            yield
    finally:
        Graph.failing = None


@pytest.mark.usefixtures("on_cpu")
def test_the_graphs_of_these_tests_replay() -> None:
    module = Captured()
    for seed in range(3):
        module.check(seed)
    counters = module.cache.stats.snapshot()
    assert (counters["captures"], counters["replays"]) == (1, 2)


@pytest.mark.usefixtures("on_cpu")
def test_of_a_capture() -> None:
    def attempt(failing: OutOfMemoryAt) -> None:
        module = Captured()
        x = random(2, 5, 4)
        expected = module.forward(x)
        try:
            with launches_too(failing):
                assert torch.equal(module(x), expected)
        except torch.OutOfMemoryError:  # in the model's own run, before the capture: nothing could be freed
            assert module.cache.stats.snapshot()["captures"] == 0
        assert Graph.is_recording == 0, "a capture that failed is still open"
        module.check(1)
        module.check(2)
        counters = module.cache.stats.snapshot()
        assert len(module.cache.captured()) == counters["captures"]
        module.cache.trim()  # as after Free, when there is memory again
        module.check(3)
        module.check(4)
        assert module.cache.stats.snapshot()["replays"] >= 1

    assert each_failure(attempt) > 10


@pytest.mark.usefixtures("on_cpu")
def test_of_a_replay() -> None:
    def attempt(failing: OutOfMemoryAt) -> None:
        module = Captured()
        module.check(0)
        x = random(2, 5, 4, seed=1)
        expected = module.forward(x)
        with launches_too(failing):
            assert torch.equal(module(x), expected)
        assert not failing.failed or module.cache.bytes == 0, "it freed nothing"
        kept = weakref.ref(x)
        del x
        gc.collect()
        assert kept() is None
        module.check(2)
        module.cache.trim()
        module.check(3)
        module.check(4)
        assert module.cache.stats.snapshot()["captures"] == 2

    assert each_failure(attempt) >= 2


# --- paged weights -----------------------------------------------------------------------------------------------


def load_first(compiled: Compiled) -> None:
    compiled.load()


def load_again(compiled: Compiled) -> None:
    compiled.load()
    compiled.check()
    compiled.unload()
    compiled.load()


def load_another_lora(compiled: Compiled) -> None:
    compiled.load()
    compiled.check()
    compiled.load("a")


def lose_pages(compiled: Compiled) -> None:
    compiled.load()
    compiled.check()
    compiled.checkpoint.reservation.evict(2)


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("before", [load_first, load_again, load_another_lora, lose_pages])
def test_of_a_fault_in(
    adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, before: Callable[[Compiled], None]
) -> None:
    """The driver maps pages, core fills them, and the model runs over them or is captured."""

    def attempt(failing: OutOfMemoryAt) -> None:
        compiled = Compiled(adapter("module_state.module_state"))
        before(compiled)
        answered = True
        with monkeypatch.context() as patched:
            patched.setattr(compiled.checkpoint.reservation, "fault", faulting(compiled, failing))
            try:
                with failing:
                    actual = compiled.run()
            except torch.OutOfMemoryError:  # in the model's own run, when nothing could be freed
                answered = False
        assert not answered or torch.equal(actual, compiled.checkpoint.expected(torch.zeros(1)))
        compiled.check()  # the next step, and the next prompt
        compiled.load(compiled.checkpoint.lora or "")
        compiled.check(2)
        compiled.cache.trim()  # as after Free, when there is memory again
        replays = compiled.counted("replays")
        for _ in range(2):
            compiled.check()
        assert compiled.counted("replays") == replays + 1

    assert each_failure(attempt) > 3


def faulting(compiled: Compiled, failing: OutOfMemoryAt) -> Callable[[int, int], Any]:
    """The reservation's `fault`, which fails as the driver does if its turn has come."""
    fault = compiled.checkpoint.reservation.fault

    def attempt(address: int, size: int) -> Any:
        try:
            failing.allocate("a page")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("Fault failed: 2") from error
        return fault(address, size)

    return attempt
