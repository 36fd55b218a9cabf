"""What captures share is counted once, by how large it grew; whether another fits is known before it is tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from compile_cache.backends.base import Call, CaptureFacts
from compile_cache.backends.cuda_graphs.pools import Pools
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.errors import OverBudgetError

from ...fakes import BUDGET, MIB, FakeGraph, FakeProgram, Module, answer, expect, session


def test_a_pool_is_as_large_as_its_captures_made_it_and_goes_with_the_last_one() -> None:
    pools, anchor = Pools(), SimpleNamespace(resets=0)
    anchor.reset = lambda: setattr(anchor, "resets", anchor.resets + 1)
    pools._anchors[0] = anchor
    pools.opened(0, 1400 * MIB)
    pools.opened(0, 7 * MIB)
    assert pools.bytes() == 1407 * MIB
    pools.closed(0)
    assert (pools.bytes(), anchor.resets) == (1407 * MIB, 0)
    pools.closed(0)
    assert (pools.bytes(), anchor.resets) == (0, 1)


def test_after_cuda_broke_a_capture_the_next_one_gets_another_pool() -> None:
    pools, resets = Pools(), list[str]()
    pools._anchors[0] = cast(Any, SimpleNamespace(reset=lambda: resets.append("old"), pool=lambda: (7, 0)))
    pools.opened(0, 1400 * MIB)
    assert pools.pool(0) == (7, 0)
    pools.broke(0)
    assert resets == ["old"]
    pools.broke(0)  # before another one was needed
    pools._anchors[0] = cast(Any, SimpleNamespace(reset=lambda: resets.append("new"), pool=lambda: (8, 0)))
    assert pools.bytes() == 1400 * MIB  # graphs of the old pool work in it
    pools.closed(0)
    assert (pools.bytes(), resets) == (0, ["old", "new"])


class Working(FakeProgram):
    """Its captures have 1 MiB of buffers and work in a pool, as CUDA graphs do. works_in: bytes, by the latent's side.

    grows: what the pool grows by beyond that.
    """

    def __init__(self) -> None:
        super().__init__(size=MIB)
        self.works_in = {8: 3 * MIB, 16: 5 * MIB, 24: 5 * MIB, 32: 9 * MIB, 40: 11 * MIB}
        self.pool = 0
        self.grows = 0
        self.rehearsals = 0

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> FakeGraph:
        self.rehearsals += 1
        needed = self.works_in[call.tensors[0].shape[-1]]
        if needed > facts.limit:
            raise OverBudgetError(needed)
        graph = super().capture(call, result, facts)
        self.pool = max(self.pool, needed + self.grows)
        return graph


@pytest.fixture
def working(cache: GraphCache) -> Working:
    program = Working()
    cache._captures.shared_bytes = lambda: program.pool  # type: ignore[method-assign]
    return program


def test_the_report_counts_the_pool_once(cache: GraphCache, working: Working, module: Module) -> None:
    for side in (8, 16, 24):
        cache.run(working, module.call(side))
    assert cache._captures.bytes == 3 * MIB + 5 * MIB
    assert [entry["bytes"] for entry in cache.report()["entries"]] == [MIB] * 3


def test_captures_that_share_a_pool_do_not_evict_each_other(
    cache: GraphCache, working: Working, module: Module
) -> None:
    for side in (32, 8, 16, 24):
        cache.run(working, module.call(side))
    assert working.open_graphs == 4
    assert cache.report()["counters"]["evictions"] == 0


def test_what_does_not_fit_beside_the_captures_in_use_is_not_made(
    cache: GraphCache, working: Working, module: Module
) -> None:
    with session(cache, working.owner):
        cache.run(working, module.call(8))
        with expect(cache, {"over_budget": 1}, graph_calls=1):
            cache.run(working, module.call(32))  # 9 MiB, 1 MiB of buffers in use, and its own buffers
    assert working.pool == 3 * MIB


def test_a_refused_one_is_not_rehearsed_again_until_there_is_room(
    cache: GraphCache, working: Working, module: Module
) -> None:
    cache.run(working, module.call(40))
    assert working.rehearsals == 1
    cache._capture_policy.memory_was_freed()
    with expect(cache, {"over_budget": 1}, graph_calls=1):
        assert answer(cache.run(working, module.call(40))) == 2.0
    assert working.rehearsals == 1
    cache._capture_policy.memory_was_freed()
    cache._captures.budget = 2 * BUDGET
    with expect(cache, graph_calls=1, captures=1):
        cache.run(working, module.call(40))


def test_one_that_grew_the_pool_beyond_the_budget_is_closed_and_later_ones_that_fit_are_kept(
    cache: GraphCache, working: Working, module: Module
) -> None:
    working.grows = 4 * MIB
    with expect(cache, {"over_budget": 1}, graph_calls=1):
        cache.run(working, module.call(32))
    assert working.open_graphs == 0
    working.grows = 0
    with expect(cache, graph_calls=2, captures=2):
        for side in (8, 16):
            cache.run(working, module.call(side))
    assert working.open_graphs == 2
