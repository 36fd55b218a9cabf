"""GraphCache with graphs that follow their weights and return no memory: they stay, and go when they cannot follow."""

from __future__ import annotations

from compile_cache.backends.base import Call, Capabilities
from compile_cache.cache import GraphCache
from compile_cache.config import CacheConfig

from .fakes import BUDGET, FakeGraph, FakeProgram, Module, answer, expect

FOLLOWING = Capabilities(available=True, captures=True, reads_live_weights=True, returns_memory=False)


class Following(FakeGraph):
    """Reads the module's factor in each replay, as long as it can."""

    can_follow = True

    def refresh_weights(self, epoch: int) -> bool:
        return self.can_follow


class FollowingProgram(FakeProgram):
    def __init__(self, module: Module) -> None:
        super().__init__(capabilities=FOLLOWING)
        self._source = module

    def capture(self, call: Call, result: object) -> Following:
        graph = Following(lambda x: x * self._source.factor, self.size)
        self.graphs.append(graph)
        return graph


def build() -> tuple[GraphCache, Module, FollowingProgram]:
    module = Module()
    cache, program = GraphCache(CacheConfig(budget_bytes=BUDGET)), FollowingProgram(module)
    cache.run(program, module.call())
    return cache, module, program


def test_new_weights_are_followed_without_another_capture() -> None:
    cache, module, program = build()
    module.load(5.0)
    with expect(cache, replays=1):
        assert answer(cache.run(program, module.call())) == 5.0


def test_a_graph_that_cannot_follow_is_closed_and_made_anew() -> None:
    cache, module, program = build()
    program.graphs[0].can_follow = False
    module.load(5.0)
    with expect(cache, captures=1, graph_calls=1):
        assert answer(cache.run(program, module.call())) == 5.0
    assert program.graphs[0].closed == 1


def test_dropping_what_is_stale_keeps_what_follows_and_nothing_else() -> None:
    cache, _, program = build()
    cache.drop_stale(program.owner, 99)
    assert program.open_graphs == 1
    program.graphs[0].can_follow = False
    cache.drop_stale(program.owner, 100)
    assert program.open_graphs == 0


def test_a_refusal_outlives_the_epoch_in_which_it_was_given() -> None:
    cache, module, _ = build()
    refused = FollowingProgram(module)
    refused.owner = 7

    def fail(call: Call, result: object) -> Following:
        refused.capture_attempts += 1
        raise RuntimeError("no operator")

    refused.capture = fail  # type: ignore[method-assign]
    for _ in range(3):
        cache.run(refused, module.call())
        module.load(3.0)
        cache.drop_stale(refused.owner, module.epoch)
    assert refused.capture_attempts == 1


def test_what_returns_no_memory_is_not_closed_to_make_room() -> None:
    cache, module, program = build()
    assert cache.trim() == 0
    assert program.open_graphs == 1
    with expect(cache, replays=1):
        cache.run(program, module.call())
    cache.forget(program.owner)
    assert program.open_graphs == 0
