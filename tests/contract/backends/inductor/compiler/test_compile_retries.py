"""Code that does not come at the first try: other strategies, other workers, and compiles by this process."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
import torch

from compile_cache.backends.base import Code
from compile_cache.backends.inductor.compiler import task_list, work
from compile_cache.backends.inductor.compiler.failures import (
    HungError,
    KilledError,
    NeedsGpuError,
    NotCompiledError,
    OtherEnvironmentError,
)
from compile_cache.backends.inductor.regions import table
from compile_cache.backends.inductor.regions.region import Region

from ....rig import TOLERANCE, Block, Model, inputs, random, seeded, tokens
from .behind_rig import Behind, Chain, code_of

CAME = {"graph_calls": 1, "region_compiles": 1, "verifications": 1, "region_calls": 1}  # a block's code is compared


@pytest.fixture
def rig() -> Behind:
    return Behind()


def test_code_that_cannot_be_made_is_tried_another_way(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    ways = []
    for _ in range(2):
        ways.append(rig.workers.finish(NotCompiledError("KeyError: 'unbacked_bindings'")).oblivious)
        rig.work()
    assert ways == [True, False]
    rig.come()
    with rig.expect(**CAME):
        assert rig.call(bound, tokens()) <= TOLERANCE


@pytest.mark.parametrize("error", [NotCompiledError("it does not lower"), HungError("no answer")])
def test_a_region_without_any_code_runs_eagerly_and_says_why(rig: Behind, error: Exception) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    while rig.workers.jobs:
        rig.workers.finish(error)
        rig.work()
    with rig.expect({"compile_failed": 1}, eager_calls=1):
        assert rig.call(bound, tokens()) == 0
    assert (rig.queue.left, rig.workers.users) == (0, 0)
    assert any(str(error) in text for text in rig.details)


@pytest.mark.parametrize("what", [(task_list, "skeleton_of"), (work, "traced")], ids=["copied", "traced"])
def test_a_block_that_cannot_be_copied_or_traced_runs_eagerly_and_says_why(
    rig: Behind, monkeypatch: pytest.MonkeyPatch, what: tuple[Any, str]
) -> None:
    def refuse(given: Any, *more: Any) -> Any:
        raise ValueError(f"not with {type(given).__name__}")

    monkeypatch.setattr(*what, refuse)
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    with rig.expect({"compile_failed": 1}, eager_calls=1):
        assert rig.call(bound, tokens()) == 0
    assert any("not with" in text for text in rig.details)
    assert not rig.workers.jobs


def test_a_lack_of_memory_for_a_copy_is_no_reason_to_run_eagerly(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    bound = rig.bind(seeded(Block))
    with monkeypatch.context() as patch:
        patch.setattr(task_list, "skeleton_of", refuse)
        assert rig.call(bound, tokens()) == 0
        assert rig.queue.left == 0
    rig.leave(bound, tokens())
    assert len(rig.workers.jobs) == 1


def test_code_that_is_wrong_at_a_calls_sizes_is_made_for_these_and_then_no_more(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints: list[Any] = []
    traced = work.traced
    monkeypatch.setattr(
        work, "traced", lambda task, yield_point: (hints.append(task.hints), traced(task, yield_point))[1]
    )
    monkeypatch.setattr(table, "difference_from_original", lambda *given: "other numbers")
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    for gives_up in (0, 0, 1):
        rig.come()
        with rig.expect(eager_calls=1, verifications=1, compile_failures=gives_up):
            assert rig.call(bound, tokens()) == 0
    rig.come()
    general, *at_sizes = hints
    assert at_sizes == [{"b": 2, "n": 5}] * 2 != [general] * 2
    with rig.expect({"compile_failed": 1}, eager_calls=1):
        assert rig.call(bound, tokens()) == 0
    assert any("gives other results than the original" in text for text in rig.details)


class Paired(Block):
    """Other code for even sizes than for odd ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.unflatten(1, (-1, 2)).sum(2) if x.shape[1] % 2 == 0 else x * 2


@pytest.mark.parametrize("batch", [2, 32])  # at 32 a general trace has the sizes of the call
@pytest.mark.parametrize(
    "counts", [(12, 9), (9, 12)], ids=str
)  # the code for even sizes excludes odd ones, or is wrong
def test_code_for_sizes_that_reach_it_later_waits_for_them(rig: Behind, counts: tuple[int, int], batch: int) -> None:
    later, first = (tokens(count, batch) for count in counts)  # as with a cache of keys and values: of the steps
    bound = rig.bind(seeded(lambda: torch.nn.Sequential(Paired())))
    rig.leave(bound, later)
    rig.come()
    rig.leave(bound, first)
    assert len(rig.workers.jobs) == 1
    with rig.expect(**CAME):  # while the other code is being compiled
        assert rig.call(bound, later) <= TOLERANCE
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=1, verifications=ANY, region_calls=1):
        assert rig.call(bound, first) <= TOLERANCE
    for x in (later, first):
        with rig.expect(graph_calls=1, region_calls=1):
            assert rig.call(bound, x) <= TOLERANCE
    assert rig.queue.left == 0


def test_a_region_gets_a_limited_number_of_pieces_of_code(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_MOST_COMPILED", 1)
    bound = rig.bind(seeded(lambda: torch.nn.Sequential(Paired())))
    rig.leave(bound, tokens(12))
    rig.come()
    with rig.expect({"compile_failed": 1}, eager_calls=1):  # no call came to the code that there is
        assert rig.call(bound, tokens(9)) == 0
    with rig.expect(**CAME):
        assert rig.call(bound, tokens(12)) <= TOLERANCE


def test_a_worker_that_is_killed_costs_its_job_one_more_try(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    ways = []
    for _ in range(3):
        ways.append(rig.workers.finish(KilledError("it ended")).oblivious)
        rig.work()
    assert ways == [True, True, False], "the second time it may be the fault of the code"
    rig.come()
    with rig.expect(**CAME):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_workers_that_memory_ended_start_again_later(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    rig.workers.running = False
    rig.workers.finish(NotCompiledError("the processes that compile were ended"))
    rig.work()
    assert (rig.queue.left, rig.workers.users) == (1, 0)
    rig.workers.running = True
    rig.now += 30
    rig.work()
    assert not rig.workers.jobs
    rig.now += 40
    rig.work()
    assert (len(rig.workers.jobs), rig.workers.users) == (1, 1)


def test_a_hang_gives_up_the_region_of_one_job_alone(rig: Behind) -> None:
    bound = rig.bind(seeded(lambda: Chain(5)))
    rig.leave(bound, random(2, 5, 16))
    rig.workers.finish(HungError("it hung"))
    rig.work()
    assert (len(rig.workers.jobs), rig.queue.left, len(rig.queue.table.failed)) == (4, 4, 1)
    rig.workers.running = False  # the program hung or ended
    while rig.workers.jobs:
        rig.workers.finish(NotCompiledError("the processes that compile hung, and were ended"))
    rig.work()
    assert (rig.queue.left, len(rig.queue.table.failed)) == (4, 1), "what waited waits again"


def test_a_region_that_failed_is_compiled_again_once_a_person_asks_for_it(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    rig.workers.finish(HungError("it hung"))
    rig.work()
    rig.leave(bound, tokens())
    assert (rig.queue.left, [why.partition(": ")[2] for why in rig.queue.table.failed]) == (0, ["it hung"])
    rig.queue.table.retry_failed()
    assert rig.queue.table.failed == []
    rig.leave(bound, tokens())
    rig.come()
    with rig.expect(**CAME):
        assert rig.call(bound, tokens()) <= TOLERANCE


@pytest.mark.parametrize("answers", [False, True])
def test_workers_that_always_end_are_started_a_few_times_and_then_no_more(rig: Behind, answers: bool) -> None:
    bound = rig.bind(seeded(lambda: Chain(3)))
    rig.leave(bound, random(2, 5, 16))
    for _ in range(3):
        assert (len(rig.workers.jobs), rig.queue.has_no_workers) == (rig.queue.left, False)
        if answers and rig.queue.left == 3:
            rig.workers.finish()
            rig.work()
        rig.workers.running = False
        while rig.workers.jobs:
            rig.workers.finish(NotCompiledError("the processes that compile ended"))
        rig.work()
        rig.workers.running = True
        rig.now += 61
        rig.work()
    assert (len(rig.workers.jobs), rig.queue.has_no_workers) == (0, True)
    rig.work(compile_local=True)
    assert rig.queue.left == 0


@pytest.mark.parametrize("step", ["unpack", "_add_unverified"])
def test_a_fault_of_the_system_stops_no_worker(rig: Behind, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise OSError(24, "Too many open files")

    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    with monkeypatch.context() as patch:
        patch.setattr(work if step == "unpack" else Region, step, fail)
        rig.workers.finish()
        rig.work()
    assert (len(rig.workers.jobs), rig.queue.has_no_workers) == (1, False)
    rig.come()
    with rig.expect(**CAME):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_a_fault_of_the_system_in_this_process_ends(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    rig = Behind(workers=0)
    monkeypatch.setattr(work, "compile_trace", fail)
    rig.leave(rig.bind(seeded(Block)), tokens())
    rig.work(compile_local=True)
    assert (rig.queue.left, len(rig.queue.table.failed)) == (0, 1)


def test_workers_with_another_environment_are_started_anew_and_no_region_is_given_up(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    rig.workers.finish(OtherEnvironmentError("settings"))
    rig.work()
    assert (rig.workers.ended, rig.queue.left, rig.queue.has_no_workers) == (1, 2, False)
    assert len(rig.workers.jobs) == 2
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=2, verifications=2, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


# --- what this process compiles ---


def test_what_needs_the_gpu_is_compiled_by_this_process_while_no_prompt_runs(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    rig.workers.finish(NeedsGpuError("RuntimeError: Found no NVIDIA driver on your system"))
    rig.come()
    with rig.expect(eager_calls=1, region_compiles=1, verifications=1, region_calls=2):
        assert rig.call(bound, *inputs()) <= TOLERANCE
    rig.come()
    assert (rig.queue.left, code_of(bound)) == (1, Code.MISSING)
    rig.work(compile_local=True)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_so_is_a_block_whose_trace_cannot_be_sent(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise TypeError("cannot pickle a lock")

    monkeypatch.setattr(work, "job_of", refuse)
    compiles_here(rig, "cannot pickle a lock")


@pytest.mark.parametrize("where", ["in_use", "_step", "twice another environment", "RESOLUTE_WORKERS=0"])
def test_so_are_all_blocks_where_no_worker_can_be_had(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise OSError("no process")

    rig = Behind(workers=0 if "WORKERS" in where else 2)
    if where == "in_use":
        monkeypatch.setattr(rig.workers, where, fail)
    elif where == "_step":  # a fault of ours
        with monkeypatch.context() as patch:
            patch.setattr(rig.queue.work, where, fail)
            rig.work()
    elif "twice" in where:
        rig.leave(rig.bind(seeded(Block)), tokens())
        for _ in range(2):
            rig.workers.finish(OtherEnvironmentError("settings"))
            rig.work()
    compiles_here(rig)
    assert rig.queue.has_no_workers is ("WORKERS" not in where)


def compiles_here(rig: Behind, said: str = "") -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    rig.leave(bound, tokens())
    assert (len(rig.workers.jobs), rig.queue.left) == (0, 1)
    rig.work(compile_local=True)
    with rig.expect(**CAME):
        assert rig.call(bound, tokens()) <= TOLERANCE
