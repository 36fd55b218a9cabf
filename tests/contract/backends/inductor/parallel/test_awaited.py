"""Calls that wait for what worker processes compile: the same artifacts, the same counters."""

from __future__ import annotations

import importlib
import itertools
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

from compile_cache.attention import chooser
from compile_cache.backends.inductor import program
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel import compile_queue, process, worker
from compile_cache.backends.inductor.parallel.job import settings_for
from compile_cache.backends.inductor.regions import region
from compile_cache.config import CacheConfig

from .....programs import run_python, wait_for
from ....rig import TOLERANCE, Attention, Block, Model, Rig, Stopper, inputs, random, relative_error, seeded

SIZES = [(1, 8, 8, 7), (17, 8, 8, 7), (2, 33, 25, 154), (1, 1, 1, 1), (3, 17, 9, 5)]
EDGES = (0, 1, 2, 16, 17, 50_000)  # sizes around the limits of guards


def rig(**config: Any) -> Rig:
    return Rig(InductorBackend(), **{"workers": 2, "compile": "before", **config})


def test_they_are_right_at_every_size_and_nothing_compiles_again(tmp_path: Path) -> None:
    one = rig(store_folder=tmp_path, source="one")
    bound = one.bind(seeded(Model))
    progress = Stopper()
    with one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        bound(*inputs(), progress=progress)
    assert progress.shown == [(0, 2), (1, 2), (2, 2)], "each counts when it comes, and is shown once"
    with one.expect(region_calls=4 * len(SIZES), graph_calls=len(SIZES), verifications=ANY):
        assert max(bound.error(*inputs(*size)) for size in SIZES) <= TOLERANCE

    # Their guards accept what those of regions accept that this process compiles.
    two = Rig(InductorBackend(), store_folder=tmp_path, source="one", workers=0)
    with two.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert two.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    here = Rig(InductorBackend(), workers=0, store_folder=tmp_path / "another", source="one")
    here.bind(seeded(Model))(*inputs())
    accepted = accepted_sizes(here)
    assert all(accepted.values())
    assert accepted_sizes(one) == accepted_sizes(two) == accepted


def test_a_call_whose_workers_have_another_environment_compiles_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another(device: torch.device) -> dict[str, Any]:
        settings = settings_for(device)
        return {**settings, "environment": [(name, "another") for name, _ in settings["environment"]]}

    monkeypatch.setattr(compile_queue, "settings_for", of_another)
    one = rig()
    with one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert one.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


def accepted_sizes(rig: Rig) -> dict[str, set[tuple[int, ...]]]:
    """By region, which of some sizes its guards accept. Guards may differ in what others imply: lowering adds such ones
    or not, by what it lowered before."""
    regions = rig.backend.table._regions.values()
    return {each.label: set(_accepted(each.compiled[0].guards.expressions)) for each in regions}


def _accepted(guards: Iterable[sympy.Basic]) -> Iterator[tuple[int, ...]]:
    symbols = sorted(set().union(*(guard.free_symbols for guard in guards)), key=str)
    for sizes in itertools.product(EDGES, repeat=len(symbols)):
        values = dict(zip(symbols, sizes, strict=True))
        if all(guard.subs(values) for guard in guards):
            yield sizes


PACKAGE = """
import torch

@torch.library.custom_op("resolute_test_kernels::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@doubled.register_fake
def _(x):
    return torch.empty_like(x)
"""


class OwnAttention(Attention):
    """With the operator that chooses a kernel, as every transformer block on NVIDIA."""

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q(x), self.k(context)))
        attended = chooser.operator()(q, k, k, None).reshape(x.shape)
        return x + self.out(attended)


class ForeignKernel(Block):
    """With an operator of an installed package, as those of comfy-kitchen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.resolute_test_kernels.doubled(self.linear(x)) + x


class Kernels(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.foreign = OwnAttention(), ForeignKernel()

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.own(x, context), self.foreign(context[..., :4])


@pytest.mark.long
def test_blocks_with_operators_that_are_not_torchs_are_compiled_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt's process they would be compiled one after the other."""
    (tmp_path / "resolute_test_kernels.py").write_text(PACKAGE, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.import_module("resolute_test_kernels")
    one = rig()
    model = seeded(Kernels)
    given = random(2, 5, 16), random(2, 7, 16, seed=1)
    results = one.bind(model)(*given)
    for found, expected in zip(results, model(*given), strict=True):
        assert relative_error(found, expected) <= TOLERANCE
    counted = one.cache.stats.counters
    assert (counted.region_compiles, counted.compile_failures, counted.region_calls) == (2, 0, 2)
    assert len([event for event in one.cache.stats.events if event.kind == "trace"]) == 2


def test_what_a_worker_cannot_compile_is_compiled_by_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "__file__", str(Path(__file__).with_name("no_such_worker.py")))
    one = rig()
    with one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert one.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


@pytest.mark.long
def test_where_no_process_can_be_started_the_call_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(low: bool) -> None:
        raise OSError("no more processes")

    one = rig()
    monkeypatch.setattr(one.backend.workers, "start", refuse)  # type: ignore[attr-defined]
    with one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert one.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert "no worker processes were started: no more processes" in caplog.text


@pytest.mark.long
def test_without_memory_to_compare_a_later_call_compares_and_then_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = region.difference_from_original, [torch.cuda.OutOfMemoryError("out of memory")]

    def difference(*args: Any) -> str | None:
        if errors:
            raise errors.pop()
        return real(*args)

    monkeypatch.setattr(region, "difference_from_original", difference)
    one = rig(store_folder=tmp_path, source="one")
    bound = one.bind(seeded(Model))
    with one.expect({"out_of_memory": 1}, region_compiles=1, verifications=2, region_calls=2, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE
    with one.expect(region_compiles=1, verifications=1, region_calls=4, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE
    two = Rig(InductorBackend(), store_folder=tmp_path, source="one", workers=0)
    with two.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert two.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


def test_inductor_is_imported_when_a_model_is_expected_and_not_before() -> None:
    program = """
import sys, torch
from compile_cache.attention import chooser
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.config import CacheConfig

backend, device = InductorBackend(), torch.device("cpu")
assert "torch._inductor.compile_fx" not in sys.modules
backend.prewarm(device, CacheConfig(workers=0))
backend.prewarm(device, CacheConfig(workers=0))
backend._prewarming.join()
assert "torch._inductor.compile_fx" in sys.modules
table = backend.table
assert backend.table is table
"""
    run_python(program)


def test_processes_that_hang_are_ended_and_their_blocks_run_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hangs.py"
    program.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(worker, "__file__", str(program))
    monkeypatch.setattr(process, "_SILENT_SECONDS", 0.3)
    one = rig()
    bound = one.bind(seeded(Model))
    with one.expect({"compile_failed": 2}, compile_failures=2, eager_calls=1):
        assert bound.error(*inputs()) == 0
    assert not one.backend.workers.running  # type: ignore[attr-defined]
    assert all("gave no result for" in detail for detail in one.details)
    with one.expect({"compile_failed": 2}, eager_calls=1):  # the next prompt neither waits nor compiles
        assert bound.error(*inputs()) == 0


def test_workers_that_cannot_be_started_early_are_logged_and_cost_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError("no more processes")

    one = rig()
    monkeypatch.setattr(one.backend.workers, "start", refuse)  # type: ignore[attr-defined]
    with caplog.at_level("WARNING"):
        one.backend.prewarm(torch.device("cpu"), CacheConfig(workers=2, compile="before"))
        one.backend._prewarming.join()  # type: ignore[attr-defined]
    assert "worker processes were not started early: no more processes" in caplog.text
    assert one.backend._table is not None  # type: ignore[attr-defined]  # inductor is imported all the same


def test_if_loras_of_gguf_weights_hold_the_memory_they_go_and_the_call_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = rig()
    module, held, calls = seeded(Model), [True], []

    def give_up(weights: Any) -> bool:
        assert {id(each) for each in weights} == {id(each) for each in module.parameters()}
        return bool(held and held.pop())

    def invoke(tensors: Any) -> Any:
        calls.append(1)
        if held or len(calls) > 3:
            raise torch.cuda.OutOfMemoryError("too large")
        return tensors[0]

    monkeypatch.setattr(program.gguf_loras, "give_up", give_up)
    bound = one.bind(module)
    bound(*inputs(), invoke=invoke, module=module)
    assert len(calls) == 2
    calls += [1, 1]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="too large"):
        bound(*inputs(), invoke=invoke, module=module)
    assert len(calls) == 5


@pytest.mark.grid(1)
@pytest.mark.parametrize("kept", [False, True])
def test_code_is_loaded_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """From workers and from the store: another thread may preload at the same time."""
    config: Any = {"store_folder": tmp_path, "source": "one"}
    if kept:
        Rig(InductorBackend(), **config, workers=0).bind(seeded(Model))(*inputs())
    one = rig(**config)
    lock, alone = one.backend.table.lock, []  # type: ignore[attr-defined]

    def look() -> None:
        alone.append(not lock.acquire(blocking=False))

    real = region.unpack

    def unpack(artifact: Any) -> Any:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return real(artifact)

    monkeypatch.setattr(region, "unpack", unpack)
    one.bind(seeded(Model))(*inputs())
    assert alone == [True, True]


def test_progress_can_be_read_while_a_call_adds_regions() -> None:
    bound = Rig(InductorBackend(), workers=0).bind(seeded(Model))
    bound(*inputs())
    regions: Any = bound.program._regions  # type: ignore[attr-defined]

    class Meeting:
        form = ("structure", "torch.float64")

        @property
        def is_ready(self) -> bool:
            regions._regions[len(regions._regions)] = Meeting()
            return False

    regions._regions = {0: Meeting()}
    assert bound.program.regions == (0, 2)


@pytest.mark.long
def test_cancel_ends_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    one = rig()
    bound = one.bind(seeded(Model))
    with pytest.raises(InterruptedError):
        bound(*inputs(), progress=Stopper(*range(5, 1000)))
    wait_for(lambda: not list(tmp_path.glob("resolute-*")))
    with one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE


@pytest.mark.long
def test_workers_stay_for_the_next_model_and_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SECONDS", 10.0)
    one = rig()
    one.bind(seeded(Model))(*inputs())
    first = started_by(one)
    assert first.alive
    with one.expect(region_compiles=1, verifications=1, region_calls=ANY, graph_calls=1):
        one.bind(seeded(lambda: Model(eps=1e-3)))(*inputs())
    assert started_by(one) is first
    wait_for(lambda: not first.alive)
    assert not one.backend.workers.running  # type: ignore[attr-defined]


def started_by(rig: Rig) -> Any:
    return rig.backend.workers._process  # type: ignore[attr-defined]


@pytest.mark.grid(2)
@pytest.mark.parametrize(("kept", "started"), [("", True), ("two", True), ("one", False)])
def test_they_are_started_early_if_the_store_has_nothing_of_this_environment(
    tmp_path: Path, kept: str, started: bool
) -> None:
    if kept:
        Rig(InductorBackend(), store_folder=tmp_path, source=kept, workers=0).bind(seeded(Model))(*inputs())
    one = rig(store_folder=tmp_path, source="one")
    one.backend.prewarm(torch.device("cpu"), one.cache.config)
    one.backend._prewarming.join()  # type: ignore[attr-defined]
    assert one.backend.workers.running is started  # type: ignore[attr-defined]
    one.backend.workers.close()  # type: ignore[attr-defined]


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
