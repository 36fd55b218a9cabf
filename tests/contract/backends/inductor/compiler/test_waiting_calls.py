"""Calls that wait for their code: warm-ups, and all calls with RESOLUTE_COMPILE=before."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

from compile_cache.backends.inductor import program
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import task_list, work, worker
from compile_cache.backends.inductor.compiler.job import settings_for
from compile_cache.backends.inductor.regions import table

from ....rig import (
    TOLERANCE,
    Block,
    Model,
    Rig,
    Stopper,
    inputs,
    seeded,
    tokens,
)
from .behind_rig import Behind

SIZES = [(1, 8, 8, 7), (17, 8, 8, 7), (2, 33, 25, 154), (1, 1, 1, 1), (3, 17, 9, 5)]
EDGES = (1, 2, 16, 17, 50_000)  # sizes around the limits of guards
COMPILED = {"region_compiles": 2, "verifications": 2, "region_calls": 4, "graph_calls": 1}  # the model's first call


def waiting(**config: Any) -> Rig:
    """With two real workers."""
    return Rig(InductorBackend(), **{"workers": 2, "compile": "before", **config})


@pytest.fixture
def rig() -> Behind:
    """Its two workers are done at once."""
    made = Behind()
    made.workers.at_once = True
    return made


def test_they_are_right_at_every_size_and_nothing_compiles_again(tmp_path: Path) -> None:
    one = waiting(store_folder=tmp_path, source="one")
    bound = one.bind(seeded(Model))
    progress = Stopper()
    with one.expect(**COMPILED):
        bound(*inputs(), progress=progress)
    assert progress.shown == [(0, 2), (1, 2), (2, 2)], "each counts when it comes, and is shown once"
    with one.expect(region_calls=4 * len(SIZES), graph_calls=len(SIZES), verifications=ANY):
        assert max(bound.error(*inputs(*size)) for size in SIZES) <= TOLERANCE

    # Their guards accept what those of regions accept that this process compiles.
    two = Rig(InductorBackend(), store_folder=tmp_path, source="one", workers=0)
    with two.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert two.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    here = Rig(InductorBackend(), workers=0, store_folder=tmp_path / "another", source="one")
    with here.expect(**COMPILED):
        here.bind(seeded(Model))(*inputs())
    accepted = accepted_sizes(here)
    assert all(accepted.values())
    assert accepted_sizes(one) == accepted_sizes(two) == accepted


def accepted_sizes(rig: Rig) -> dict[str, set[tuple[int, ...]]]:
    """By region, which of some sizes its guards accept. Guards may differ in what others imply: lowering adds such ones
    or not, by what it lowered before."""
    regions = rig.backend.table._regions.values()  # type: ignore[attr-defined]
    return {each.label: set(_accepted(each.compiled[0].guards.expressions)) for each in regions}


def _accepted(guards: Iterable[sympy.Basic]) -> Iterator[tuple[int, ...]]:
    symbols = sorted(set().union(*(guard.free_symbols for guard in guards)), key=str)
    for sizes in itertools.product(EDGES, repeat=len(symbols)):
        values = dict(zip(symbols, sizes, strict=True))
        if all(guard.subs(values) for guard in guards):
            yield sizes


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_call_runs_twice_only_where_several_workers_compile(workers: int) -> None:
    rig = Behind(workers=workers)
    rig.workers.at_once = True
    bound, calls = rig.bind(seeded(Model)), []

    def invoke(given: Any) -> Any:
        calls.append(1)
        return bound.module(*given)

    with rig.expect(**COMPILED):
        bound(*inputs(), invoke=invoke)
    assert (len(calls), len(rig.workers.started)) == ((2, 1) if workers == 2 else (1, 0))
    with rig.expect(region_calls=4, graph_calls=1):
        assert rig.call(bound, *inputs()) <= TOLERANCE


# --- where a worker cannot compile ---


@pytest.mark.parametrize("lacks", ["its program", "the environment", pytest.param("a process", marks=pytest.mark.long)])
def test_what_no_worker_can_compile_this_process_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    def of_another(device: torch.device) -> dict[str, Any]:
        settings = settings_for(device)
        return {**settings, "environment": [(name, "another") for name, _ in settings["environment"]]}

    def refuse() -> None:
        raise OSError("no more processes")

    one = waiting()
    if lacks == "the environment":
        monkeypatch.setattr(task_list, "settings_for", of_another)
    elif lacks == "a process":
        monkeypatch.setattr(one.backend.workers, "start", refuse)  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(worker, "__file__", str(Path(__file__).with_name("no_such_worker.py")))
    with one.expect(**COMPILED):
        assert one.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert ("no worker processes compile: no more processes" in caplog.text) is (lacks == "a process")


def test_processes_that_hang_are_ended_and_no_block_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(worker, "__file__", str(hangs))
    monkeypatch.setattr(worker, "SILENT_SECONDS", 0.3)
    one = waiting()
    with one.expect(**COMPILED):  # by this process
        assert one.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert not one.backend.workers.running  # type: ignore[attr-defined]


@pytest.mark.long
def test_without_memory_to_compare_a_later_call_compares_and_then_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = table.difference_from_original, [torch.cuda.OutOfMemoryError("out of memory")]

    def difference(*args: Any) -> str | None:
        if errors:
            raise errors.pop()
        return real(*args)

    monkeypatch.setattr(table, "difference_from_original", difference)
    one = waiting(store_folder=tmp_path, source="one")
    bound = one.bind(seeded(Model))
    with one.expect({"out_of_memory": 1}, region_compiles=1, verifications=2, region_calls=2, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE
    with one.expect(region_compiles=1, verifications=1, region_calls=4, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE
    two = Rig(InductorBackend(), store_folder=tmp_path, source="one", workers=0)
    with two.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert two.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


def test_a_compile_without_memory_is_waited_for_no_longer(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one tries again."""

    def refuse(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    bound = rig.bind(seeded(Block))
    with monkeypatch.context() as patch:
        patch.setattr(work, "traced", refuse)
        for _ in range(2):
            with rig.expect({"out_of_memory": 1}, eager_calls=1):
                assert bound.error(tokens()) == 0
    assert rig.queue.left == 1
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert bound.error(tokens()) <= TOLERANCE


def test_if_loras_of_gguf_weights_hold_the_memory_they_go_and_the_call_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Rig(InductorBackend(), workers=0)
    module, held, calls = seeded(Model), [True], []

    def free_after_oom(weights: Any) -> bool:
        assert {id(each) for each in weights} == {id(each) for each in module.parameters()}
        return bool(held and held.pop())

    def invoke(tensors: Any) -> Any:
        calls.append(1)
        if held or len(calls) > 3:
            raise torch.cuda.OutOfMemoryError("too large")
        return tensors[0]

    monkeypatch.setattr(program.gguf_loras, "free_after_oom", free_after_oom)
    bound = one.bind(module)
    bound(*inputs(), invoke=invoke, module=module)
    assert len(calls) == 2
    calls += [1, 1]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="too large"):
        bound(*inputs(), invoke=invoke, module=module)
    assert len(calls) == 5


# --- beside calls that wait for nothing ---


@pytest.mark.parametrize("workers", [1, 2])
def test_a_warm_up_takes_what_earlier_calls_left_and_leaves_what_it_does_not_need(workers: int) -> None:
    rig = Behind(workers=workers)
    bound, other = rig.bind(seeded(Model)), rig.bind(seeded(Block))
    rig.leave(bound, *inputs())
    rig.workers.finish()
    while rig.workers.jobs:
        rig.workers.finish()
    rig.call(other, tokens())
    with rig.expect(**COMPILED):
        assert bound.error(*inputs()) <= TOLERANCE
    assert [len(each.compiled) for each in rig.backend.table._regions.values()][:2] == [1, 1]  # type: ignore[attr-defined]
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(other, tokens()) <= TOLERANCE


def test_what_a_cancelled_warm_up_left_is_compiled_in_the_background(rig: Behind) -> None:
    rig.workers.at_once = False
    bound = rig.bind(seeded(Model))
    with pytest.raises(InterruptedError):
        bound(*inputs(), progress=Stopper(*range(3, 1000)))
    assert (rig.queue.left, rig.workers.ended) == (2, 0)
    rig.come()
    with rig.expect(**COMPILED):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_a_call_that_claimed_the_host_takes_no_work_from_a_thread_that_pauses_for_it(rig: Behind) -> None:
    """The thread pauses within a trace, which the call then waits for."""
    bound, host = rig.bind(seeded(Block)), rig.cache.stats.host
    rig.call(bound, tokens())
    claimed, traces = threading.Event(), threading.Event()

    def yield_point() -> None:
        traces.set()
        claimed.wait(60)
        host.rest()

    def work() -> None:
        with host.working():
            rig.queue.work.step(compile_local=False, yield_point=yield_point)

    def call() -> None:
        with host.claimed():  # as where the call is captured
            claimed.set()
            bound(tokens())

    threads = [threading.Thread(target=each, daemon=True) for each in (work, call)]
    threads[0].start()
    assert traces.wait(60)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        threads[1].start()
        threads[1].join(60)
        assert not threads[1].is_alive(), "each waits for the other"
    threads[0].join(60)


def test_code_from_inductors_own_cache_is_compared_at_size_one(fresh_inductor_cache: None) -> None:
    first, second = Rig(InductorBackend(), workers=0), Rig(InductorBackend(), workers=0)
    first.bind(seeded(Model))(*inputs())
    bound = second.bind(seeded(Model))
    bound(*inputs())
    with second.expect(verifications=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs(1, 1, 1, 1)) <= TOLERANCE
    with second.expect(region_calls=4, graph_calls=1):
        assert bound.error(*inputs(1, 1, 1, 1)) <= TOLERANCE


@pytest.fixture
def fresh_inductor_cache(tmp_path: Path) -> Iterator[None]:
    with temporary_cache_dir(str(tmp_path)):
        yield
