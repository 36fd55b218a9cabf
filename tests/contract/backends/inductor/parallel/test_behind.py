"""Compiles behind the picture: calls run originals, and code comes in between calls or while nothing runs."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel import behind as behinds
from compile_cache.backends.inductor.parallel import compile_queue
from compile_cache.backends.inductor.parallel import job as jobs
from compile_cache.backends.inductor.parallel.failures import (
    HungError,
    KilledError,
    NeedsGpuError,
    NotCompiledError,
    OtherEnvironmentError,
)
from compile_cache.backends.inductor.parallel.wanted import Wanted
from compile_cache.backends.inductor.regions import region
from compile_cache.regions.site import Hook, HookBuilder, RegionSite
from compile_cache.regions.skeleton import skeleton_of

from .....programs import run_python
from ....rig import (
    TOKENS,
    TOLERANCE,
    Block,
    Convolution,
    Model,
    Rig,
    Stopper,
    inputs,
    original,
    random,
    relative_error,
    seeded,
    tokens,
)  # fmt: skip
from .behind_rig import Behind


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    """Its thread does nothing: it might see the time of a call before that begins."""
    monkeypatch.setattr(behinds, "_IDLE_SECONDS", float("inf"))
    made = Behind()
    yield made
    made.behind._end()


def test_a_call_runs_originals_and_a_later_one_the_code_that_came(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    with rig.expect(eager_calls=1):
        assert rig.call(bound, *inputs()) == 0  # the very originals
    assert (len(rig.workers.jobs), rig.queue.left) == (0, 2)
    rig.call(bound, *inputs())
    assert (len(rig.workers.jobs), rig.queue.left, rig.workers.users, rig.workers.low) == (2, 2, 1, True)
    rig.workers.finish()
    with rig.expect(eager_calls=1):
        assert rig.call(bound, *inputs()) == 0  # the code came at its end
    with rig.expect(eager_calls=1, region_compiles=1, verifications=1, region_calls=2):
        assert rig.call(bound, *inputs()) <= TOLERANCE
    assert bound.program.waits
    rig.workers.finish()
    rig.call(bound, *inputs())
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE
    assert not bound.program.waits
    assert (rig.queue.left, rig.workers.users) == (0, 0)
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs(3, 9, 10, 5)) <= TOLERANCE


class Watch:
    """By it a call that runs regions takes twice as long as one that runs originals."""

    def __init__(self, counters: Any) -> None:
        self._counters, self._before = counters, counters.region_calls

    def stop(self) -> None:
        self._seconds = 2.0 if self._counters.region_calls > self._before else 1.0

    def seconds(self, wait: bool) -> float:
        return self._seconds


def test_code_that_is_slower_on_this_device_is_left_alone(rig: Behind) -> None:
    bound, counters = rig.bind(seeded(Model)), rig.cache.stats.counters
    rig.cache.whole_calls._stopwatch = lambda device: Watch(counters)  # type: ignore[assignment, return-value]
    for _ in range(8):
        rig.call(bound, *inputs())
    while bound.program.waits:
        if rig.workers.jobs:
            rig.workers.finish()
        rig.call(bound, *inputs())
    while not counters.bypasses["not_faster"]:
        assert counters.graph_calls < 16, "twelve that waited for nothing were to be timed"
        rig.call(bound, *inputs())
    with rig.expect(eager_calls=1, bypasses={"not_faster": 1}):
        assert rig.call(bound, *inputs()) == 0


def test_it_says_how_many_regions_are_left_and_for_how_long(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    assert rig.backend.coming() == (0, 0.0)
    rig.call(bound, *inputs())
    left, seconds = rig.backend.coming()
    assert (left, seconds > 15.0) == (2, True), "none ended yet, and two workers have one each"
    more = rig.backend.coming(more=2)
    assert (more[0], more[1] > seconds + 10.0) == (2, True), "those that no call left yet are compiled after these"
    rig.call(bound, *inputs())
    rig.workers.finish()
    rig.call(bound, *inputs())
    assert rig.backend.coming() == (1, 0.25), "the one that ended took a second, so the other is about to end"
    rig.workers.finish()
    rig.call(bound, *inputs())
    assert rig.backend.coming() == (0, 0.0)


@pytest.mark.parametrize(
    ("trace_seconds", "call_seconds", "expected"), [(1.0, 10.0, [0, 1, 1, 2, 2]), (0.25, 1000.0, [1, 2])]
)
def test_calls_pay_for_a_share_of_their_time_and_each_for_one_trace_at_most(
    rig: Behind,
    monkeypatch: pytest.MonkeyPatch,
    trace_seconds: float,
    call_seconds: float,
    expected: list[int],
) -> None:
    rig.queue.trace_seconds = trace_seconds
    bound = rig.bind(seeded(Model))
    rig.call(bound, *inputs())
    traced = compile_queue._job

    def slow(wanted: Any) -> jobs.Job:
        rig.now += trace_seconds
        return traced(wanted)

    monkeypatch.setattr(compile_queue, "_job", slow)
    submitted = []
    for _ in expected:
        rig.call(bound, *inputs(), seconds=call_seconds)
        submitted.append(len(rig.workers.jobs))
    assert submitted == expected


def test_the_time_before_a_first_call_pays_for_nothing(rig: Behind) -> None:
    rig.queue.trace_seconds = 0.5
    rig.call(rig.bind(seeded(Block)), tokens(), seconds=1e6)
    assert not rig.workers.jobs


def test_while_nothing_runs_work_goes_on_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behinds, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(behinds, "_SHARE", 0.0)
    rig = Behind()
    rig.behind._clock = time.monotonic
    bound = rig.bind(seeded(Block))
    rig.call(bound, tokens())
    ends = time.monotonic() + 60
    while not rig.workers.jobs and time.monotonic() < ends:
        time.sleep(0.01)
    rig.workers.finish()
    while rig.queue.left and time.monotonic() < ends:
        time.sleep(0.01)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE
    rig.behind._end()


def test_code_that_cannot_be_made_is_tried_another_way(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    ways = []
    for _ in range(2):
        ways.append(rig.workers.finish(NotCompiledError("KeyError: 'unbacked_bindings'")).oblivious)
        rig.call(bound, tokens())
    assert ways == [True, False]
    rig.workers.finish()
    rig.call(bound, tokens())
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def in_two_states(module: Any) -> HookBuilder:
    """Hooks of a block that computes something else for an odd number of tokens; each state knows of the other."""

    def twice(block: Any, x: torch.Tensor) -> torch.Tensor:
        return original(block, original(block, x))

    def others(x: torch.Tensor) -> list[tuple[RegionSite, list[torch.Tensor]]]:
        return [(site, [x.new_empty((1, 1, 1)).expand(x.shape)]) for site in sites]

    sites = [
        RegionSite("block", "Block.even", module, original, (TOKENS,), others=others),
        RegionSite("block", "Block.odd", module, twice, (TOKENS,), others=others),
    ]

    def build(run: Any, bypass: Any) -> list[Hook]:
        return [Hook(module, lambda x: run(sites[x.shape[1] % 2], x), tuple(sites))]

    return build


def test_what_other_calls_of_a_block_need_is_made_after_all_that_calls_came_to(rig: Behind) -> None:
    module, other = seeded(Block), seeded(Convolution)
    bound = rig.bind(module, in_two_states(module))
    with torch.inference_mode():
        expected = module(module(tokens(5)))
    rig.call(bound, tokens(4))
    rig.call(rig.bind(other), random(2, 8, 6, 6))
    waiting = list(rig.queue.waiting.values())
    assert [wanted.is_foreseen for wanted in waiting] == [False, True, False]
    assert all(wanted.call.site.others is None for wanted in waiting), "it would hold the block with its weights"
    rig.leave(bound, tokens(4))
    rig.leave(bound, tokens(4))
    made = [rig.workers.finish().label for _ in range(3)]
    assert made == ["Block.even", "Convolution", "Block.odd"]
    rig.leave(bound, tokens(4))
    rig.leave(bound, tokens(4))
    assert rig.queue.left == 0
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert relative_error(rig.answer(bound, tokens(5)), expected) <= TOLERANCE


def test_a_call_that_waits_leaves_only_what_it_came_to(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    module, left, copy = seeded(Block), [], compile_queue._without_model

    def noted(call: Any, policy: Any) -> Any:
        left.append(call.site.kind)
        return copy(call, policy)

    monkeypatch.setattr(compile_queue, "_without_model", noted)
    bound = rig.bind(module, in_two_states(module))
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        bound(tokens(4))
    assert (left, rig.queue.left, rig.workers.ended) == (["Block.even"], 0, 0)


@pytest.mark.parametrize("error", [NotCompiledError("it does not lower"), HungError("no answer")])
def test_a_region_without_any_code_runs_eagerly_and_says_why(rig: Behind, error: Exception) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    while rig.workers.jobs:
        rig.workers.finish(error)
        rig.call(bound, tokens())
    with rig.expect(eager_calls=1, bypasses={"compile_failed": 1}):
        assert rig.call(bound, tokens()) == 0
    assert (rig.queue.left, rig.workers.users) == (0, 0)
    assert any(str(error) in text for text in rig.details)


@pytest.mark.parametrize("what", ["skeleton_of", "_job"])
def test_a_block_that_cannot_be_copied_or_traced_runs_eagerly_and_says_why(
    rig: Behind, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(given: Any, *more: Any) -> Any:
        raise ValueError(f"not with {type(given).__name__}")

    monkeypatch.setattr(compile_queue, what, refuse)
    bound = rig.bind(seeded(Block))
    for _ in range(5):
        assert rig.call(bound, tokens()) == 0
    with rig.expect(eager_calls=1, bypasses={"compile_failed": 1}):
        assert rig.call(bound, tokens()) == 0
    assert any("not with" in text for text in rig.details)
    assert not rig.workers.jobs


@pytest.mark.parametrize("where", ["in_use", "_do_next"])
def test_without_workers_or_after_a_fault_of_ours_a_later_call_compiles_what_it_lacks(
    rig: Behind, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise OSError("no process")

    monkeypatch.setattr(rig.workers if where == "in_use" else rig.queue, where, fail)
    monkeypatch.setattr(rig.backend.workers, "in_use", fail)  # type: ignore[attr-defined]
    bound = rig.bind(seeded(Block))
    for _ in range(2):  # the first one that does anything
        assert rig.call(bound, tokens()) == 0
    assert (rig.queue.is_unable, rig.queue.left) == (True, 0)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_code_that_is_wrong_at_a_calls_sizes_is_made_for_these(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    rig.workers.finish()
    rig.call(bound, tokens())
    hints: list[Any] = []
    traced = compile_queue.trace_of
    monkeypatch.setattr(
        compile_queue, "trace_of", lambda call, *given: (hints.append(given[0]), traced(call, *given))[1]
    )
    monkeypatch.setattr(region, "difference_from_original", lambda *given: "other numbers")
    with rig.expect(eager_calls=1, verifications=1):
        assert rig.call(bound, tokens()) == 0
    assert hints == [{"b": 2, "n": 5}]
    monkeypatch.undo()
    rig.workers.finish()
    rig.call(bound, tokens())
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_workers_that_memory_ended_start_again_later(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    rig.workers.running = False
    rig.workers.finish(NotCompiledError("the processes that compile were ended"))
    rig.call(bound, tokens(), seconds=1)
    assert (rig.queue.left, rig.workers.users) == (1, 0)
    rig.workers.running = True
    rig.call(bound, tokens(), seconds=30)
    assert not rig.workers.jobs
    rig.call(bound, tokens(), seconds=60)
    assert (len(rig.workers.jobs), rig.workers.users) == (1, 1)


def test_workers_start_with_the_first_trace(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.call(bound, tokens())
    assert (rig.queue.left, rig.workers.devices) == (1, [])
    rig.call(bound, tokens())
    assert (rig.queue.left, rig.workers.devices) == (1, [torch.device("cpu")])


def test_workers_with_another_environment_are_started_anew_and_no_region_is_given_up(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    assert len(rig.workers.jobs) == 2
    rig.workers.finish(OtherEnvironmentError("settings"))
    rig.call(bound, *inputs())
    assert (rig.workers.ended, rig.queue.left, rig.queue.is_unable) == (1, 2, False)
    for _ in range(2):
        rig.call(bound, *inputs())
    while rig.workers.jobs:
        rig.workers.finish()
        rig.call(bound, *inputs())
    assert rig.call(bound, *inputs()) <= TOLERANCE
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_where_new_workers_differ_too_a_later_call_compiles_what_it_lacks(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    for _ in range(2):
        rig.workers.finish(OtherEnvironmentError("settings"))
        rig.call(bound, tokens())
        rig.call(bound, tokens())
    assert (rig.queue.is_unable, rig.queue.left) == (True, 0)
    with rig.expect(graph_calls=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_a_compile_that_asks_the_gpu_is_done_by_a_later_call(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    rig.workers.finish(NeedsGpuError("RuntimeError: Found no NVIDIA driver on your system"))
    with rig.expect(eager_calls=1):
        assert rig.call(bound, *inputs()) == 0
    with rig.expect(eager_calls=1, region_compiles=1, verifications=1, region_calls=2):
        assert rig.call(bound, *inputs()) <= TOLERANCE
    rig.workers.finish()
    rig.call(bound, *inputs())
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_a_worker_that_is_killed_costs_its_job_one_more_try(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    ways = []
    for _ in range(3):
        ways.append(rig.workers.finish(KilledError("it ended")).oblivious)
        rig.call(bound, tokens())
    assert ways == [True, True, False], "the second time it may be the fault of the code"
    rig.workers.finish()
    rig.call(bound, tokens())
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_work_for_a_second_device_waits_until_the_workers_of_the_first_are_done(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = torch.device("cpu", 0), torch.device("cpu", 1)
    of_kind = {"Convolution": first, "Attention": second}
    monkeypatch.setattr(Wanted, "device", property(lambda wanted: of_kind[wanted.call.region.label]))
    bound = rig.bind(seeded(Model))
    rig.call(bound, *inputs(), seconds=0)
    for device in of_kind.values():
        for _ in range(2):
            rig.call(bound, *inputs())
        assert (len(rig.workers.jobs), rig.workers.users, rig.workers.devices[-1]) == (1, 1, device)
        rig.workers.finish()
    rig.call(bound, *inputs())
    assert (rig.queue.left, rig.workers.users) == (0, 0)


class Prompts(Stopper):
    """A Progress that knows whether a prompt runs."""

    runs = True

    def prompt_runs(self) -> bool:
        return self.runs


def test_code_that_no_call_compared_yet_survives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behinds, "_IDLE_SECONDS", float("inf"))
    stored: dict[str, Any] = {"store_folder": tmp_path, "source": "one"}
    one = Behind(**stored)
    bound = one.bind(seeded(Block))
    one.leave(bound, tokens())
    one.workers.finish()
    one.call(bound, tokens())  # it came at the end of this call
    (marked,) = tmp_path.glob("*/*.region")
    two = Rig(InductorBackend(), workers=0, **stored)
    with two.expect(region_loads=1, verifications=1, region_calls=1, graph_calls=1):
        assert two.bind(seeded(Block)).error(tokens()) <= TOLERANCE
    assert not marked.exists()
    three = Rig(InductorBackend(), workers=0, **stored)
    with three.expect(region_loads=1, region_calls=1, graph_calls=1):
        assert three.bind(seeded(Block)).error(tokens()) <= TOLERANCE
    one.behind._end()


def test_code_that_is_wrong_does_not_stay_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behinds, "_IDLE_SECONDS", float("inf"))
    one = Behind(store_folder=tmp_path, source="one")
    bound = one.bind(seeded(Block))
    one.leave(bound, tokens())
    one.workers.finish()
    one.call(bound, tokens())
    assert len(list(tmp_path.glob("*/*.region"))) == 1
    monkeypatch.setattr(region, "difference_from_original", lambda *given: "it is wrong")
    assert one.call(bound, tokens()) == 0
    assert not list(tmp_path.glob("*/*.region"))
    one.behind._end()


def test_a_warm_up_takes_what_earlier_calls_left(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    assert (rig.queue.left, len(rig.workers.jobs)) == (2, 2)
    with rig.expect(graph_calls=1, region_compiles=2, verifications=2, region_calls=4):
        assert bound.error(*inputs()) <= TOLERANCE
    assert (rig.queue.left, rig.workers.low) == (0, False)


def test_a_warm_up_that_compiles_in_turn_keeps_what_came_and_leaves_nothing_to_workers(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two processors: a worker runs beside a model that samples, and none for a call that waits."""
    bound, other = rig.bind(seeded(Model)), rig.bind(seeded(Block))
    rig.leave(bound, *inputs())
    rig.leave(other, tokens())
    rig.workers.finish()
    monkeypatch.setattr(bound.program, "_worker_count", lambda call: 0)
    with rig.expect(graph_calls=1, region_compiles=2, verifications=2, region_calls=4):
        assert bound.error(*inputs()) <= TOLERANCE
    assert (rig.workers.ended, rig.queue.left, rig.queue.jobs) == (1, 1, {})  # the other model's region waits again
    rig.leave(other, tokens())
    rig.workers.finish()
    rig.call(other, tokens())
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(other, tokens()) <= TOLERANCE


def test_what_a_worker_could_not_compile_does_not_wait_again_beside_a_warm_up(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    rig.workers.finish(NotCompiledError("no code"))
    monkeypatch.setattr(bound.program, "_worker_count", lambda call: 0)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert bound.error(tokens()) <= TOLERANCE
    assert rig.queue.left == 0


def test_what_calls_left_survives_a_warm_up_of_another_model_that_is_cancelled(rig: Behind) -> None:
    rig.leave(rig.bind(seeded(Model)), *inputs())
    with pytest.raises(InterruptedError):
        rig.bind(seeded(Block))(tokens(), progress=Stopper(*range(1, 1000)))
    assert rig.queue.left == 2


def test_a_cancel_and_a_second_model_change_nothing_of_what_waits(rig: Behind) -> None:
    bound, other = rig.bind(seeded(Model)), rig.bind(seeded(Model, seed=1))
    rig.call(bound, *inputs(), seconds=0)
    assert rig.queue.left == 2
    with pytest.raises(InterruptedError):
        rig.call(rig.bind(seeded(Block)), tokens(), invoke=_cancelled, progress=Stopper())
    rig.call(other, *inputs())
    assert rig.queue.left == len(rig.workers.jobs) == 2  # the models share their regions
    for _ in range(2):
        rig.workers.finish()
    rig.call(bound, *inputs())
    with rig.expect(graph_calls=1, region_compiles=2, verifications=2, region_calls=4):
        assert rig.call(other, *inputs()) <= TOLERANCE
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_after_a_warm_up_calls_run_what_it_compiled(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.call(bound, tokens(), seconds=0)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert bound.error(tokens()) <= TOLERANCE
    assert rig.queue.left == 0
    with rig.expect(graph_calls=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_a_lack_of_memory_for_a_copy_is_no_reason_to_run_eagerly(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    bound = rig.bind(seeded(Block))
    with monkeypatch.context() as patch:
        patch.setattr(compile_queue, "skeleton_of", refuse)
        assert rig.call(bound, tokens()) == 0
        assert rig.queue.left == 0
    rig.leave(bound, tokens())
    assert len(rig.workers.jobs) == 1


def _cancelled(tensors: Any) -> Any:
    raise InterruptedError("cancelled")


def test_what_waits_keeps_no_model_alive(rig: Behind) -> None:
    module = seeded(Model)
    bound = rig.bind(module)
    rig.call(bound, *inputs(), seconds=0)
    weights = [weakref.ref(each) for each in module.parameters()]
    bound.program.close()
    del module, bound
    gc.collect()
    assert not any(each() is not None for each in weights)
    assert rig.queue.left == 2


def test_a_call_that_waits_has_what_is_missing_compiled_at_once(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert bound.error(tokens()) <= TOLERANCE  # a warm-up
    assert rig.queue.left == 0


def test_a_copy_has_the_lists_of_its_time_and_no_weights() -> None:
    block = seeded(Block)
    block.linear.weight_function = []
    copy: Any = skeleton_of(block)
    block.linear.weight_function.append(abs)
    assert copy.linear.weight_function == []
    assert all(each.is_meta for each in copy.parameters())
    assert copy.linear.weight.shape == block.linear.weight.shape
    assert not any(each.is_meta for each in block.parameters())


def test_a_call_for_which_nothing_came_runs_without_hooks(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())
    ran: list[bool] = []

    def invoke(tensors: Any) -> Any:
        ran.append("forward" in vars(bound.module))
        return bound.module(*tensors)

    for number in range(4):
        rig.call(bound, tokens(), invoke=invoke)
        if number == 1:
            rig.workers.finish()  # it comes at the end of the third call
    assert ran == [False, False, False, True]
    assert not bound.program.waits


def test_after_a_call_that_raised_early_the_next_one_goes_through_hooks(rig: Behind) -> None:
    bound = rig.bind(seeded(Block))
    rig.leave(bound, tokens())

    def cancel(tensors: Any) -> Any:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        rig.call(bound, tokens(batch=3), invoke=cancel)
    with rig.expect(eager_calls=1):
        assert rig.call(bound, tokens()) == 0
    assert bound.program.waits


STOPS = """
from tests.contract.backends.inductor.parallel.test_behind import Behind, Model, inputs, seeded, time
rig = Behind()
rig.behind._clock = time.monotonic
rig.call(rig.bind(seeded(Model)), *inputs(), seconds=0)
print(rig.queue.left)
"""


def test_python_ends_with_work_left() -> None:
    assert run_python(STOPS).split() == ["2"]


# Its workers do not look for the end of this process, as while they import torch.
STOPS_WITH_WORKERS = """
import sys, time
from pathlib import Path
from compile_cache.backends.inductor.parallel import worker
from tests.contract.backends.inductor.parallel.test_behind import InductorBackend, Model, Rig, inputs, seeded
worker.__file__ = sys.argv[1]
Path(sys.argv[1]).write_text("import os, time; os.close(2); time.sleep(600)")
rig = Rig(InductorBackend(), compile="behind", workers=2)
rig.bind(seeded(Model))(*inputs(), is_behind=True)
while not rig.backend.workers.running:
    time.sleep(0.01)
print(rig.backend._behind.queue.left, rig.backend.workers._process._process.pid)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="looks for a process by a signal")
def test_python_leaves_no_worker_when_it_ends_with_work_left(tmp_path: Path) -> None:
    left, worker = map(int, run_python(STOPS_WITH_WORKERS, tmp_path / "program.py").split())
    assert left == 2
    with pytest.raises(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
