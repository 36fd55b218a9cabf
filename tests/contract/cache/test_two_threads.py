"""Two threads call models at the same time, as two GPUs or a pack with threads of its own do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig

from ...unit.fakes import BUDGET, FakeProgram, Module, answer
from ..rig import TOLERANCE, Bound, Model, Rig, inputs, relative_error, seeded


def at_once(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, begun together. Raises the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "two threads wait for each other"
    if errors:
        raise errors[0]


def test_the_first_calls_of_two_models_compile_each_region_once() -> None:
    rig = Rig(InductorBackend(), workers=0)
    models = [rig.bind(seeded(Model, seed)) for seed in range(2)]

    def check(bound: Bound) -> None:
        for size in (8, 12):
            given = inputs(height=size)
            with torch.inference_mode():
                assert relative_error(bound(*given), bound.module(*given)) <= TOLERANCE

    at_once(*(lambda bound=bound: check(bound) for bound in models))  # type: ignore[misc]
    counters = rig.cache.stats.snapshot()
    assert counters["region_compiles"] == 2  # a convolution and an attention, which both models have
    assert (counters["compile_failures"], counters["bypasses"]) == (0, {})


def test_captures_that_one_thread_makes_while_another_frees_them_give_each_its_own_answers() -> None:
    cache = GraphCache(CacheConfig(budget_bytes=BUDGET))
    modules = [Module(factor=float(number + 2)) for number in range(2)]
    programs = [FakeProgram(owner=number + 1) for number in range(2)]

    def sample(module: Module, program: FakeProgram) -> None:
        for step in range(60):
            if step % 10 == 0:
                cache.open_session(program.owner)
            assert answer(cache.run(program, module.call(8 + step % 4, device=f"cpu:{program.owner}"))) == module.factor
            if step % 20 == 19:
                module.load(module.factor + 1)
        cache.close_session(program.owner)

    def free() -> None:
        for _ in range(100):
            cache.trim()
            cache.report()

    at_once(*(lambda pair=pair: sample(*pair) for pair in zip(modules, programs, strict=True)), free)  # type: ignore[misc]
    assert sum(program.open_graphs for program in programs) == len(cache.captured())
    cache.trim()
    assert cache.bytes == sum(program.open_graphs for program in programs) == 0


def test_two_threads_of_one_model_share_its_captures() -> None:
    cache = GraphCache(CacheConfig(budget_bytes=BUDGET))
    module, program = Module(), FakeProgram()

    def sample() -> None:
        for step in range(40):
            assert answer(cache.run(program, module.call(8 + step % 2))) == 2.0

    at_once(sample, sample)
    assert program.open_graphs == cache.stats.snapshot()["captures"] == 2
