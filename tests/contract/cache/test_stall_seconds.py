"""Whatever a prompt waits for is in `stall_seconds`, each second once. The clock is a fake that only work moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from compile_cache.backends.base import Call, Capabilities, CaptureFacts
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import compile_queue, work
from compile_cache.backends.inductor.regions import table as regions
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.errors import CaptureError

from ..backends.inductor.compiler.behind_rig import Behind
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
    clock.slow(monkeypatch, work, "compile_trace", 100.0)
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
    table = warm.program._regions._table  # type: ignore[attr-defined]
    before = waited(timed.cache)

    class Busy:
        """The table's lock, which `preload` holds for five seconds."""

        def __enter__(self) -> None:
            clock.now += 5.0

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(table, "lock", Busy())
    warm(tokens(9))
    assert waited(timed.cache) - before == 5.0


def test_the_run_that_looks_for_missing_regions(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Behind(workers=2)
    rig.workers.at_once, rig.cache.stats.clock = True, clock
    bound = rig.bind(seeded(lambda: nn.Sequential(Block())))
    clock.slow(monkeypatch, bound.module, "forward", 7.0)
    bound(tokens())
    # The second run gives the answer, so it is no wait. It compiles, which the fake clock does not see.
    assert (clock.now, waited(rig.cache)) == (14.0, 7.0)


def test_waiting_for_another_process_that_compiles_the_same_regions(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Behind(workers=0)
    rig.cache.stats.clock = clock
    bound = rig.bind(seeded(Block))

    def sleep(seconds: float) -> None:
        clock.now += seconds
        rig.now += seconds

    class Store:
        def build_lock(self, key: str) -> Any:
            return SimpleNamespace(release=lambda: None) if clock.now >= 9.0 else None

        def load(self, key: str, known: frozenset[str]) -> list[Any]:
            return []

        def save(self, artifact: Any) -> None: ...

    monkeypatch.setattr(compile_queue, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(bound.program._regions.misses, "_store_for", lambda device: Store())  # type: ignore[attr-defined]
    bound(tokens())
    assert waited(rig.cache) == clock.now
    assert 9.0 <= clock.now < 11.0, "it looks each second"
    assert rig.cache.stats.counters.region_calls == 1


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
