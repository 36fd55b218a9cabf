"""The places where the host works, called in the order of a user's prompts, and the calls that each makes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ..in_process import PACK
from . import driver, models

SIZE, OTHER_SIZE = 64, 72


def calls_of(work: Callable[[], Any]) -> int:
    """Python functions entered (a generator counts each time it goes on) and C functions called, in this thread."""
    count = 0

    def counted(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def uncounted(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, which `calls_of` leaves out."""

    def run(*args: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return work(*args)
        finally:
            sys.setprofile(before)

    return run


class Graph:
    """A CUDA graph that records and launches nothing."""

    def capture_begin(self, **_: Any) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, inductor captures on the CPU: everything around the graph is ours, and the graph is a fake."""
    inside = f"{PACK}.compile_cache.backends"
    capturing = importlib.import_module(f"{inside}.cuda_graphs.capture")
    backend = importlib.import_module(f"{inside}.registry").get("inductor")
    able = dataclasses.replace(backend.probe("cpu"), available=True, captures=True)
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
    cuda = SimpleNamespace(
        CUDAGraph=Graph, current_stream=lambda device=None: stream, stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device: None, mem_get_info=lambda device: (0, 0),
    )  # fmt: skip
    pools = SimpleNamespace(
        stream=lambda device: stream, pool=lambda device: (1, 0), opened=lambda *_: None, closed=lambda *_: None,
        bytes=lambda device=None: 0,
    )  # fmt: skip
    cost = SimpleNamespace(bytes=1, host_share=lambda: 1.0, seconds=lambda: 0.0)
    with contextlib.ExitStack() as held:
        for where, name, value in (
            (capturing, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor)),
            (capturing.pools, "shared", pools),
            (capturing, "make_room", lambda *_: None),
            (capturing, "cost_of_run", lambda device: contextlib.nullcontext(cost)),
            (capturing, "waits_of", lambda run: run() or []),
            (capturing, "map_memory", lambda graph: None),
            (backend, "probe", lambda device: able),
        ):
            held.enter_context(mock.patch.object(where, name, value))
        held.enter_context(driver.installed())
        held.enter_context(torch.inference_mode())
        yield


class Host:
    """One model behind Compile Model, and what a user does with it."""

    def __init__(self, core: SimpleNamespace, name: str, **changes: Any) -> None:
        self.name, self.stock = name, models.make(name, **changes)
        self.network = self.stock.model.diffusion_model
        self._runtime = core.ours("process.runtime")
        self._compile = core.ours("patch.diffusion_model").compile_diffusion_model
        self._compiled: Any = None

    @property
    def counters(self) -> Any:
        return self._runtime.cache().stats.counters

    def execute(self) -> None:
        """The node is executed."""
        self._compiled = self._compile(self.stock, "inductor")

    def prepare(self) -> None:
        """Leave out the model's computation, let the CPU stand for the GPU, and do not count core's own work."""
        (forward,) = self._compiled.object_patches.values()
        forward._own_method = _nothing
        weights = self._runtime.record_of(self.network).weights
        weights._host = weights.stable_addresses._host = models.HOST
        weights.paged._fill_module = uncounted(weights.paged._fill_module)

    def load(self) -> None:
        """As core loads it before each run."""
        self._compiled.partially_load(models.GPU)

    def end_run(self) -> None:
        self._compiled.cleanup()

    def call(self, size: int = SIZE) -> Callable[[], Any]:
        latent, others = models.call_of(self.name, size)
        (name,) = self._compiled.object_patches
        forward = getattr(self.network, name.rpartition(".")[2])
        return lambda: forward(latent, **others)

    def first_call(self) -> Callable[[], Any]:
        """Of a run."""
        call = self.call()
        return lambda: (self._compiled.pre_run(), call())


def _nothing(module: Any, latent: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(latent)


def measure(host: Host) -> dict[str, int]:
    """The calls of each place."""
    captures, replays = host.counters.captures, host.counters.replays
    found = {"a node, first for a model": calls_of(host.execute)}
    host.prepare()
    host.load()
    found["first call after a restart"] = calls_of(host.first_call())
    host.call()()
    found["a replayed call"] = calls_of(host.call())
    found["a new size"] = calls_of(host.call(OTHER_SIZE))
    host.end_run()
    host.load()
    found["first call of a run"] = calls_of(host.first_call())
    host.end_run()
    found["a node again"] = calls_of(host.execute)
    assert host.counters.captures - captures == 2, "a call was not captured"
    assert host.counters.replays - replays == 3, "a call was not replayed"
    return found


def collections_in_runs(host: Host, runs: int) -> int:
    """How often Python collects all objects in so many runs of one step."""
    found = []

    def noted(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            found.append(about)

    gc.collect()
    gc.callbacks.append(noted)
    try:
        for _ in range(runs):
            host.load()
            host.first_call()()
            host.end_run()
    finally:
        gc.callbacks.remove(noted)
    return len(found)
