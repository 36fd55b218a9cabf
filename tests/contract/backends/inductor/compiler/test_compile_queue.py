"""Calls that wait for nothing: they run originals, leave their blocks to the queue, and compare the code that comes."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.base import Code
from compile_cache.backends.inductor import program
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import work
from compile_cache.backends.inductor.compiler.failures import HungError
from compile_cache.backends.inductor.compiler.task import CompileTask
from compile_cache.backends.inductor.lower import private_cache
from compile_cache.backends.inductor.lower.shape_guards import ShapeGuards, Verdict
from compile_cache.backends.inductor.regions import table
from compile_cache.errors import CaptureError
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec
from compile_cache.modules.site import installed
from compile_cache.store import artifact_store

from ....rig import TOLERANCE, Attention, Block, Bound, Convolution, Model, Rig, Stopper, inputs, random, seeded, tokens
from .behind_rig import Behind, Chain, code_of

CPU = torch.device("cpu")


@pytest.fixture
def rig() -> Behind:
    return Behind()


def test_a_call_runs_originals_and_a_later_one_the_code_that_came(rig: Behind) -> None:
    bound = rig.bind(seeded(Model))
    with rig.expect(eager_calls=1):
        assert rig.call(bound, *inputs()) == 0  # the very originals
    assert (len(rig.workers.jobs), rig.queue.left, rig.workers.started) == (0, 2, []), "it works on nothing itself"
    assert (bound.program.ran_originals, code_of(bound)) == (True, Code.MISSING)
    rig.work()
    assert (len(rig.workers.jobs), rig.queue.left, rig.workers.started) == (2, 2, [(2, CPU)])
    rig.workers.finish()
    with rig.expect(eager_calls=1):
        assert rig.call(bound, *inputs()) == 0
    rig.work()
    with rig.expect(eager_calls=1, region_compiles=1, verifications=1, region_calls=2):
        assert rig.call(bound, *inputs()) <= TOLERANCE
    assert (bound.program.ran_originals, code_of(bound)) == (True, Code.MISSING)
    rig.come()
    assert code_of(bound) is Code.READY, "the next call runs it all"
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE
    assert (bound.program.ran_originals, rig.queue.left, rig.workers.users) == (False, 0, 0)
    # A size at which a convolution's guard (16 pictures and more) fails is compared, each once.
    with rig.expect(graph_calls=1, region_calls=4, verifications=1):
        assert rig.call(bound, *inputs(3, 9, 10, 5)) <= TOLERANCE
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs(3, 9, 10, 5)) <= TOLERANCE


def test_a_call_compares_the_code_of_a_few_regions_and_of_more_where_it_runs_them_all_from_then_on(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (program.MOST_COMPARED, program.MOST_AT_ONCE) == (4, 10)
    monkeypatch.setattr(program, "MOST_COMPARED", 2)
    monkeypatch.setattr(program, "MOST_AT_ONCE", 3)
    bound, x = rig.bind(seeded(lambda: Chain(5))), random(2, 5, 16)
    rig.leave(bound, x)
    for _ in range(2):
        rig.workers.finish()
        rig.work()
    assert code_of(bound) is Code.UNVERIFIED, "so many that a call is worth it"
    rig.come()
    assert code_of(bound) is Code.UNVERIFIED, "too many for one call"
    with rig.expect(eager_calls=1, region_compiles=2, verifications=2, region_calls=4):
        assert rig.call(bound, x) <= TOLERANCE
    assert code_of(bound) is Code.READY
    with rig.expect(graph_calls=1, region_compiles=3, verifications=3, region_calls=10):
        assert rig.call(bound, x) <= TOLERANCE


def test_the_first_call_of_a_size_compares_a_few_regions(rig: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does more than a later call already, and no call has shown whether a few more would finish the job."""
    monkeypatch.setattr(program, "MOST_COMPARED", 1)
    bound = rig.bind(seeded(lambda: Chain(3)))
    rig.leave(bound, random(2, 5, 16))
    rig.come()
    with rig.expect(eager_calls=1, region_compiles=1, verifications=1, region_calls=2):
        assert rig.call(bound, random(2, 7, 16)) <= TOLERANCE


def test_what_is_called_most_comes_first_and_decoders_after_models(rig: Behind) -> None:
    decoder, rare, model = rig.bind(seeded(Block)), rig.bind(seeded(Convolution)), rig.bind(seeded(lambda: Chain(1)))
    key = {"key": _decoder_key(decoder)}
    for _ in range(9):
        rig.call(decoder, tokens(), **key)
    rig.call(rare, random(2, 8, 6, 6))
    for _ in range(2):
        rig.call(model, random(2, 5, 16))
    rig.work()
    assert [job.label for job, _ in rig.workers.jobs] == ["Attention", "Convolution", "Block"]


def _decoder_key(bound: Bound) -> Any:
    spec = TensorSpec(tuple(tokens().shape), "torch.float32", "cpu")
    return GraphKey(Signature((("input 0", spec),)), Role.VAE_DECODE, "model", "inductor")


# --- while a call is recorded ---


def test_while_a_call_is_recorded_it_runs_again_what_it_ran(rig: Behind) -> None:
    """Code may come between the run and its capture."""
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    rig.workers.finish()
    rig.work()
    expected = bound(*inputs(), background_compile=True)
    rig.come()
    bound.program._regions.misses.repeat()  # type: ignore[attr-defined]
    with rig.expect(region_calls=2), torch.inference_mode(), miss_path_hooks(bound):
        assert torch.equal(bound.module(*inputs()), expected)
    with pytest.raises(CaptureError, match="came to another Convolution"), miss_path_hooks(bound):
        bound.module(*inputs(height=11))
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def miss_path_hooks(bound: Bound) -> Any:
    return installed(bound.program._hooks)  # type: ignore[attr-defined]


def test_a_call_that_compares_code_runs_as_its_capture_does(rig: Behind) -> None:
    """Its regions run originals once more, and compiled code at the next call."""
    bound = rig.bind(seeded(Model))
    rig.leave(bound, *inputs())
    rig.come()
    keys: list[Any] = []
    real = bound.program.compare
    bound.program.run = lambda call: (keys.append(call.key), real(call))[1]  # type: ignore[method-assign, assignment]
    with rig.expect(eager_calls=1, region_compiles=2, verifications=2):
        assert rig.call(bound, *inputs()) == 0
    assert bound.program.code_of(keys[0]) is Code.READY
    del bound.program.run
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_a_cancel_that_a_trace_takes_reaches_the_prompt_and_the_trace_is_made_again(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI's operations raise it once, in the thread that runs them first."""
    pressed, trace_of = [InterruptedError("cancelled")], work.trace_of

    def interrupted(*arguments: Any) -> Any:
        if pressed:
            raise pressed.pop()
        return trace_of(*arguments)

    bound, progress = rig.bind(seeded(Attention, 16)), Stopper()
    rig.call(bound, random(2, 5, 16), random(2, 5, 16), progress=progress)
    monkeypatch.setattr(work, "trace_of", interrupted)
    rig.work()
    assert (progress.passed_on, rig.queue.left, rig.workers.jobs) == (1, 1, [])
    rig.now += 1.0
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, random(2, 5, 16), random(2, 5, 16)) <= TOLERANCE


# --- several devices, models and processes ---


def test_work_for_a_second_device_waits_until_the_workers_of_the_first_are_done(
    rig: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = {"Convolution": torch.device("cpu", 0), "Attention": torch.device("cpu", 1)}
    monkeypatch.setattr(CompileTask, "device", property(lambda task: of_kind[task.call.region.label]))
    rig.leave(rig.bind(seeded(Model)), *inputs())
    for device in of_kind.values():
        rig.work()
        assert (len(rig.workers.jobs), rig.workers.users, rig.workers.started[-1][1]) == (1, 1, device)
        rig.workers.finish()
    rig.work()
    assert (rig.queue.left, rig.workers.users) == (0, 0)


def test_a_cancel_and_a_second_model_change_nothing_of_what_waits(rig: Behind) -> None:
    bound, other = rig.bind(seeded(Model)), rig.bind(seeded(Model, seed=1))
    rig.call(bound, *inputs())

    def cancelled(tensors: Any) -> Any:
        raise InterruptedError("cancelled")

    with pytest.raises(InterruptedError):
        rig.call(rig.bind(seeded(Block)), tokens(), invoke=cancelled, progress=Stopper())
    rig.leave(other, *inputs())
    assert rig.queue.left == len(rig.workers.jobs) == 2, "the models share their regions"
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=2, verifications=2, region_calls=4):
        assert rig.call(other, *inputs()) <= TOLERANCE
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_what_waits_keeps_no_model_alive(rig: Behind) -> None:
    module = seeded(Model)
    bound = rig.bind(module)
    rig.call(bound, *inputs())
    weights = [weakref.ref(each) for each in module.parameters()]
    bound.program.close()
    del module, bound
    gc.collect()
    assert not any(each() is not None for each in weights)
    assert rig.queue.left == 2


def test_two_processes_with_one_store_compile_each_region_once(tmp_path: Path) -> None:
    """The locks of files are of an open file, so two in one process exclude each other too."""
    stored: dict[str, Any] = {"store_folder": tmp_path, "source": "one"}
    first, second = Behind(**stored), Behind(**stored)
    bound, other = first.bind(seeded(Model)), second.bind(seeded(Model))
    first.leave(bound, *inputs())
    for _ in range(2):  # it looks for the code each second
        second.now += 2.0
        second.leave(other, *inputs())
    assert (len(first.workers.jobs), len(second.workers.jobs), second.queue.left) == (2, 0, 2)
    first.workers.finish()
    first.work()
    second.now += 0.5
    second.work()
    assert second.queue.left == 2
    second.now += 1.0
    second.work()
    assert (second.queue.left, code_of(other)) == (1, Code.MISSING)
    first.come()
    second.now += 2.0
    second.come()
    with second.expect(graph_calls=1, verifications=2, region_calls=4):  # its first call compares
        assert second.call(other, *inputs()) <= TOLERANCE
    assert second.workers.started == []


def test_a_process_that_gives_a_region_up_lets_another_one_try(tmp_path: Path) -> None:
    stored: dict[str, Any] = {"store_folder": tmp_path, "source": "one"}
    first, second = Behind(**stored), Behind(**stored)
    first.leave(first.bind(seeded(Block)), tokens())
    second.leave(second.bind(seeded(Block)), tokens())
    first.workers.finish(HungError("no answer"))
    first.work()
    second.now += 2.0
    second.work()
    assert (first.queue.left, len(second.workers.jobs)) == (0, 1)


def test_code_that_no_call_compared_yet_survives_the_process(tmp_path: Path) -> None:
    stored: dict[str, Any] = {"store_folder": tmp_path, "source": "one"}
    one = Behind(**stored)
    one.leave(one.bind(seeded(Block)), tokens())
    one.come()
    (marked,) = tmp_path.glob("*/*.region")
    for compared in (1, 0):
        later = Rig(InductorBackend(), workers=0, **stored)
        with later.expect(region_loads=1, verifications=compared, region_calls=1, graph_calls=1):
            assert later.bind(seeded(Block)).error(tokens()) <= TOLERANCE
        assert not marked.exists()


def _with_stored_code(folder: Path) -> tuple[Behind, Any]:
    """A block whose code came and was stored, before a call compares it."""
    one = Behind(store_folder=folder, source="one")
    bound = one.bind(seeded(Block))
    one.leave(bound, tokens())
    one.come()
    return one, bound


def test_a_full_disk_after_the_comparison_leaves_what_was_stored_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, bound = _with_stored_code(tmp_path)
    monkeypatch.setattr(artifact_store, "write_file", _full)
    with one.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert one.call(bound, tokens()) <= TOLERANCE
    assert len(list(tmp_path.glob("*/*.region"))) == 1


def _full(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_code_that_the_first_call_cannot_use_stays_stored_for_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, bound = _with_stored_code(tmp_path)
    monkeypatch.setattr(ShapeGuards, "check", lambda guards, sizes: (Verdict.BROKEN, "an even size"))
    assert one.call(bound, tokens()) == 0
    assert len(list(tmp_path.glob("*/*.region"))) == 1


def test_a_call_does_not_wait_for_a_load_that_waits_for_a_compile(tmp_path: Path) -> None:
    stored: dict[str, Any] = {"store_folder": tmp_path, "source": "one"}
    first, rig = Behind(**stored), Behind(**stored)
    first.leave(first.bind(seeded(Block)), tokens())
    first.come()
    bound, compiles, ends = rig.bind(seeded(Block)), threading.Event(), threading.Event()

    def compile_something() -> None:
        with private_cache.inductor_lock:
            compiles.set()
            ends.wait(60)

    thread = threading.Thread(target=compile_something)
    thread.start()
    try:
        assert compiles.wait(60)
        with rig.expect(eager_calls=1):
            assert rig.call(bound, tokens()) == 0
        assert rig.backend.preload([rig.queue.tasks[0].key], CPU, rig.cache.config) == 0
    finally:
        ends.set()
        thread.join()
    rig.work()
    assert (len(rig.workers.jobs), rig.queue.left) == (0, 0), "the queue loads it"
    with rig.expect(verifications=1, region_calls=1, graph_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_code_that_is_wrong_does_not_stay_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Behind(store_folder=tmp_path, source="one")
    bound = one.bind(seeded(Block))
    one.leave(bound, tokens())
    one.come()
    assert len(list(tmp_path.glob("*/*.region"))) == 1
    monkeypatch.setattr(table, "difference_from_original", lambda *given: "it is wrong")
    assert one.call(bound, tokens()) == 0
    assert not list(tmp_path.glob("*/*.region"))


def test_a_start_whose_store_lacks_one_region_runs_the_others_compiled(tmp_path: Path) -> None:
    stored: dict[str, Any] = {"store_folder": tmp_path, "source": "one"}
    one = Behind(**stored)
    for _ in range(2):
        one.leave(one.bind(seeded(lambda: Chain(3))), random(2, 5, 16))
        one.come()
    min(tmp_path.glob("*/*.region")).unlink()
    two = Behind(**stored)
    bound = two.bind(seeded(lambda: Chain(3)))
    with two.expect(region_loads=2, region_calls=4, eager_calls=1):
        assert two.call(bound, random(2, 5, 16)) <= TOLERANCE
    assert (bound.program.ran_compiled, bound.program.ran_originals, two.queue.left) == (True, True, 1)
    assert two.cache.stats.counters.waiting_calls == 1
    two.come()
    with two.expect(region_compiles=1, verifications=1, region_calls=6, graph_calls=1):
        assert two.call(bound, random(2, 5, 16)) <= TOLERANCE
