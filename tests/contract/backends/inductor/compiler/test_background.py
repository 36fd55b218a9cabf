"""The thread that works on the queue: beside calls, while nothing runs, and when Python ends."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import background, process
from compile_cache.backends.inductor.lower import artifacts, private_cache
from compile_cache.config import CacheConfig
from compile_cache.telemetry.host_load import HostLoad

from .....programs import run_python, wait_for
from ....rig import TOLERANCE, Block, Model, Rig, Stopper, inputs, seeded, tokens
from .behind_rig import Behind


def thread_of(rig: Any) -> threading.Thread | None:
    found: threading.Thread | None = rig.backend._background._thread
    return found


@pytest.fixture
def rig() -> Behind:
    """With its thread."""
    made = Behind()
    made.queue.on_left = made.background._begin
    return made


def test_a_thread_does_the_work_and_ends_with_it(rig: Behind) -> None:
    rig.workers.at_once = True
    bound = rig.bind(seeded(Model))
    for _ in range(2):
        rig.call(bound, *inputs())
        assert thread_of(rig) is not None or not rig.queue.left
        wait_for(lambda: thread_of(rig) is None, 60)
    with rig.expect(graph_calls=1, region_calls=4):
        assert rig.call(bound, *inputs()) <= TOLERANCE


def test_what_no_worker_can_compile_comes_once_no_prompt_ran_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.2)
    rig, prompts = Behind(workers=0), [True]
    rig.queue.on_left, rig.cache.stats.host.prompt_runs = rig.background._begin, lambda: bool(prompts)
    bound = rig.bind(seeded(Block))
    rig.call(bound, tokens())
    thread = thread_of(rig)
    assert thread is not None
    thread.join(1.0)
    assert (thread.is_alive(), rig.queue.left) == (True, 1), "a prompt runs"
    prompts.clear()
    thread.join(60)
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_it_says_how_many_regions_are_left_and_for_how_long() -> None:
    rig = Behind()
    bound = rig.bind(seeded(Model))
    assert rig.backend.compile_eta() == (0, 0.0)
    rig.leave(bound, *inputs())
    assert rig.backend.compile_eta() == (2, None), "none ended yet, so nothing tells how long one takes"
    rig.now += 1.0
    rig.workers.finish()
    rig.work()
    assert rig.backend.compile_eta() == (1, 0.25), "the one that ended took a second, so the other is about to end"
    more, seconds = rig.backend.compile_eta(more=2)
    assert (more, seconds is not None and seconds >= 1.0) == (1, True), "those that no call left yet are compiled after"
    rig.come()
    assert rig.backend.compile_eta() == (0, 0.0)


class Watch:
    """By it a call that runs regions takes twice as long as one that runs originals."""

    def __init__(self, counters: Any) -> None:
        self._counters, self._before = counters, counters.region_calls

    def stop(self) -> None:
        self._seconds = 2.0 if self._counters.region_calls > self._before else 1.0

    def seconds(self, wait: bool) -> float:
        return self._seconds


def test_code_that_is_slower_on_this_device_is_left_alone() -> None:
    rig = Behind()
    bound, counters = rig.bind(seeded(Block)), rig.cache.stats.counters
    rig.cache.compiled_vs_eager._stopwatch = lambda device: Watch(counters)  # type: ignore[assignment, return-value]
    for _ in range(8):
        rig.call(bound, tokens())
    rig.come()
    while not counters.bypasses["not_faster"]:
        assert counters.graph_calls < 16, "twelve that waited for nothing were to be timed"
        rig.call(bound, tokens())
    with rig.expect({"not_faster": 1}, eager_calls=1):
        assert rig.call(bound, tokens()) == 0


# --- starts and ends ---


def test_inductor_is_imported_when_a_model_is_expected_and_not_before() -> None:
    program = """
import sys, torch
from compile_cache.attention import chooser
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.config import CacheConfig
from compile_cache.telemetry.host_load import HostLoad

backend, device = InductorBackend(), torch.device("cpu")
assert "torch._inductor.compile_fx" not in sys.modules
backend.prewarm(device, CacheConfig(workers=0), HostLoad())
backend.prewarm(device, CacheConfig(workers=0), HostLoad())
backend._prewarming.join()
assert "torch._inductor.compile_fx" in sys.modules
table = backend.table
assert backend.table is table
"""
    run_python(program)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("kept", "lacks", "started"), [("", False, True), ("two", False, True), ("one", False, False), ("one", True, True)]
)
def test_workers_start_early_if_the_store_has_nothing_of_this_environment_or_lacks_something(
    tmp_path: Path, kept: str, lacks: bool, started: bool
) -> None:
    if kept:
        Rig(InductorBackend(), store_folder=tmp_path, source=kept, workers=0).bind(seeded(Block))(tokens())
    one = Rig(InductorBackend(), store_folder=tmp_path, source="one", workers=2)
    one.backend.prewarm(torch.device("cpu"), one.cache.config, one.cache.stats.host, lacks)
    one.backend._prewarming.join()  # type: ignore[attr-defined]
    assert one.backend.workers.running is started  # type: ignore[attr-defined]
    one.backend.workers.close()  # type: ignore[attr-defined]


def test_workers_that_cannot_be_started_early_are_logged_and_cost_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError("no more processes")

    backend = InductorBackend()
    monkeypatch.setattr(backend.workers, "start", refuse)
    with caplog.at_level("WARNING"):
        backend.prewarm(torch.device("cpu"), CacheConfig(workers=2), HostLoad())
        backend._prewarming.join()  # type: ignore[union-attr]
    assert "worker processes were not started early: no more processes" in caplog.text
    assert backend._table is not None  # inductor is imported all the same


@pytest.mark.long
def test_workers_stay_for_the_next_model_and_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SECONDS", 10.0)
    one = Rig(InductorBackend(), workers=2)
    workers: Any = one.backend.workers  # type: ignore[attr-defined]
    one.bind(seeded(Model))(*inputs())
    first = workers._process
    assert first.alive
    one.bind(seeded(lambda: Model(eps=1e-3)))(*inputs())
    assert workers._process is first
    wait_for(lambda: not first.alive)
    assert not workers.running


@pytest.mark.long
def test_what_a_cancelled_call_left_goes_on_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = Rig(InductorBackend(), workers=2)
    bound = one.bind(seeded(Model))
    with pytest.raises(InterruptedError):
        bound(*inputs(), progress=Stopper(*range(5, 1000)))
    wait_for(lambda: thread_of(one) is None)
    wait_for(lambda: not list(tmp_path.glob("resolute-*")))
    with one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE


@pytest.mark.grid(1)
@pytest.mark.parametrize("kept", [False, True])
def test_code_is_loaded_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """From workers and from the store: another thread may preload at the same time."""
    config: Any = {"store_folder": tmp_path, "source": "one"}
    if kept:
        Rig(InductorBackend(), **config, workers=0).bind(seeded(Model))(*inputs())
    one = Behind(**config)
    one.workers.at_once = True
    alone: list[bool] = []
    real = artifacts.remove_other_source  # in the middle of a load

    def looking(graph: Any) -> None:
        other = threading.Thread(target=lambda: alone.append(not private_cache.inductor_lock.acquire(blocking=False)))
        other.start()
        other.join()
        real(graph)

    monkeypatch.setattr(artifacts, "remove_other_source", looking)
    one.bind(seeded(Model))(*inputs())
    assert alone == [True, True]


def test_progress_can_be_read_while_a_call_adds_regions() -> None:
    bound = Rig(InductorBackend(), workers=0).bind(seeded(Block))
    bound(tokens())
    regions: Any = bound.program._regions  # type: ignore[attr-defined]

    class Meeting:
        form = ("structure", "torch.float64")

        @property
        def is_ready(self) -> bool:
            regions._regions[len(regions._regions)] = Meeting()
            return False

    regions._regions = {0: Meeting()}
    assert bound.program.regions == (0, 1)


STOPS = """
from tests.contract.backends.inductor.compiler.test_background import Behind, Model, inputs, seeded
rig = Behind()
rig.queue.on_left = rig.background._begin
rig.call(rig.bind(seeded(Model)), *inputs())
print(rig.queue.left)
"""


def test_python_ends_with_work_left() -> None:
    assert run_python(STOPS).split() == ["2"]


# Its workers do not look for the end of this process, as while they import torch.
STOPS_WITH_WORKERS = """
import sys, time
from pathlib import Path
from compile_cache.backends.inductor.compiler import worker
from tests.contract.backends.inductor.compiler.test_background import InductorBackend, Model, Rig, inputs, seeded
worker.__file__ = sys.argv[1]
Path(sys.argv[1]).write_text("import os, time; os.close(2); time.sleep(600)")
rig = Rig(InductorBackend(), compile="behind", workers=2)
rig.bind(seeded(Model))(*inputs(), background_compile=True)
while not rig.backend.workers.running:
    time.sleep(0.01)
print(rig.backend._background.queue.left, rig.backend.workers._process._process.pid)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="looks for a process by a signal")
def test_python_leaves_no_worker_when_it_ends_with_work_left(tmp_path: Path) -> None:
    left, worker = map(int, run_python(STOPS_WITH_WORKERS, tmp_path / "program.py").split())
    assert left == 2
    with pytest.raises(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
