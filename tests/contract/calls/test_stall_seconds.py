"""Whatever a prompt waits for is in `stall_seconds`, each second once. The clock is a fake that only work moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from compile_cache.backends.base import Call, Capabilities, CaptureFacts
from compile_cache.backends.inductor import program as programs
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel.pool import WorkerPool
from compile_cache.backends.inductor.regions import region as regions
from compile_cache.backends.inductor.regions import table as tables
from compile_cache.calls.cache import GraphCache
from compile_cache.errors import CaptureError

from ..rig import Block, Bound, Rig, seeded, tokens


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, seconds: float) -> None:
        """Each call of `place.name` takes so long."""
        original = getattr(place, name)

        def slowed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, slowed)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock, rig: Rig) -> Rig:
    rig.cache.stats.clock = clock
    return rig


def waited(cache: GraphCache) -> float:
    return cache.stats.counters.stall_seconds


def test_a_compile_and_its_comparison_with_the_original(
    clock: Clock, timed: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.slow(monkeypatch, tables, "compile_trace", 100.0)
    clock.slow(monkeypatch, regions, "difference_from_original", 1.0)
    bound = timed.bind(seeded(Block))
    bound(tokens())
    assert waited(timed.cache) == clock.now == 101.0
    bound(tokens())
    assert waited(timed.cache) == clock.now == 101.0


def test_waiting_for_a_thread_that_loads_regions_ahead(
    clock: Clock, timed: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = timed.bind(seeded(Block))
    warm(tokens())
    table = warm.program._table  # type: ignore[attr-defined]
    before = waited(timed.cache)

    class Busy:
        """The table's lock, which `preload` holds for five seconds."""

        def __enter__(self) -> None:
            clock.now += 5.0

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(table, "lock", Busy())
    warm(tokens(9))
    assert waited(timed.cache) - before == 5.0


def test_the_run_that_looks_for_missing_regions(clock: Clock, monkeypatch: pytest.MonkeyPatch, cold: Rig) -> None:
    cold.cache.stats.clock = clock
    bound = cold.bind(seeded(lambda: nn.Sequential(Block())))
    monkeypatch.setattr(bound.program, "_worker_count", lambda call: 2)
    monkeypatch.setattr(programs.AwaitedCall, "finish", lambda self, keys, announce: None)
    monkeypatch.setattr(programs.AwaitedCall, "leaves", lambda self, key, device: self._keys.add(key))
    clock.slow(monkeypatch, bound.module, "forward", 7.0)
    bound(tokens())
    # The second run gives the answer, so it is no wait. It compiles, which the fake clock does not see.
    assert (clock.now, waited(cold.cache)) == (14.0, 7.0)


def _refuse(*given: Any) -> Any:
    raise OSError("no process")


def test_waiting_for_another_process_that_compiles_the_same_regions(
    clock: Clock, cold: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.cache.stats.clock = clock
    bound = cold.bind(seeded(Block))
    monkeypatch.setattr(bound.program, "_worker_count", lambda call: 2)
    monkeypatch.setattr(WorkerPool, "in_use", _refuse)

    class Store:
        @contextlib.contextmanager
        def build_lock(self, key: str, check: Callable[[], None]) -> Iterator[None]:
            clock.now += 9.0
            yield

        def load(self, key: str, known: frozenset[str]) -> list[Any]:
            return []

        def save(self, artifact: Any) -> None: ...

    monkeypatch.setattr(bound.program._regions, "_store_for", lambda device: Store())  # type: ignore[attr-defined]
    bound(tokens())
    # Once for the workers, of which none starts, and once for the compile in this process.
    assert waited(cold.cache) == clock.now == 18.0


def test_a_capture_with_its_rehearsal_also_one_that_fails(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = GraphCache()
    cache.stats.clock = clock
    backend = InductorBackend()
    bound = Bound(seeded(Block), backend, cache, None)
    program = bound.program
    monkeypatch.setattr(program, "run", lambda call: call.invoke(call.tensors))
    program.capabilities = Capabilities(available=True, compiles=True, captures=True)

    def capture(call: Call, result: Any, facts: CaptureFacts) -> Any:
        clock.now += 3.0
        raise CaptureError("it waits for the GPU")

    monkeypatch.setattr(program, "capture", capture)
    bound(tokens())
    assert waited(cache) == 3.0
    bound(tokens())
    assert waited(cache) == 3.0, "it is not tried again"
