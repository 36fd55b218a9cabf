"""GraphCache with graphs that read live weights and never return memory, as OneFlow's do."""

from __future__ import annotations

from compile_cache.backends.base import Call, Capabilities
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig

from ..fakes import BUDGET, FakeGraph, FakeProgram, Module, answer, expect

LIVE = Capabilities(available=True, captures=True, keeps_graphs=True)


class LiveGraph(FakeGraph):
    """Reads the module's current factor in each replay, unless `can_refresh` is False."""

    can_refresh = True

    def refresh_weights(self, epoch: int) -> bool:
        return self.can_refresh


class LiveProgram(FakeProgram):
    def __init__(self, module: Module) -> None:
        super().__init__(capabilities=LIVE)
        self._source = module

    def capture(self, call: Call, result: object, memory: object) -> LiveGraph:
        graph = LiveGraph(lambda x: x * self._source.factor, self.size)
        self.graphs.append(graph)
        return graph


def build() -> tuple[GraphCache, Module, LiveProgram]:
    module = Module()
    cache, program = GraphCache(CacheConfig(budget_bytes=BUDGET)), LiveProgram(module)
    cache.run(program, module.call())
    return cache, module, program


def test_new_weights_need_no_new_capture() -> None:
    cache, module, program = build()
    module.load(5.0)
    with expect(cache, replays=1):
        assert answer(cache.run(program, module.call())) == 5.0


def test_a_graph_that_cannot_refresh_is_closed_and_captured_again() -> None:
    cache, module, program = build()
    program.graphs[0].can_refresh = False
    module.load(5.0)
    with expect(cache, captures=1, graph_calls=1):
        assert answer(cache.run(program, module.call())) == 5.0
    assert program.graphs[0].closed == 1


def test_drop_stale_keeps_only_graphs_that_can_refresh() -> None:
    cache, _, program = build()
    cache.drop_stale(program.owner, 99)
    assert program.open_graphs == 1
    program.graphs[0].can_refresh = False
    cache.drop_stale(program.owner, 100)
    assert program.open_graphs == 0


def test_a_failed_capture_stays_refused_in_later_epochs() -> None:
    cache, module, _ = build()
    refused = LiveProgram(module)
    refused.owner = 7

    def fail(call: Call, result: object, memory: object) -> LiveGraph:
        refused.capture_attempts += 1
        raise RuntimeError("no operator")

    refused.capture = fail  # type: ignore[method-assign]
    for _ in range(3):
        cache.run(refused, module.call())
        module.load(3.0)
        cache.drop_stale(refused.owner, module.epoch)
    assert refused.capture_attempts == 1


def test_a_graph_that_returns_no_memory_is_never_evicted() -> None:
    cache, module, program = build()
    assert cache.trim() == 0
    assert program.open_graphs == 1
    with expect(cache, replays=1):
        cache.run(program, module.call())
    cache.forget(program.owner)
    assert program.open_graphs == 0
