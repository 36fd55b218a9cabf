"""Calls that are not captured: a lack of memory passes, and a GPU that is busy all the time is remembered."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_cache.cache import capture_policy
from compile_cache.cache.capture_policy import CapturePolicy
from compile_cache.cache.captures import Captures, capture_key
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.errors import CaptureError, NoGainError
from compile_cache.store import codec
from compile_cache.telemetry.stats import Stats
from compile_cache.tuning import machine

from ..fakes import BUDGET, MIB, FakeProgram, Module, Rig, answer, expect, oom

# --- a lack of memory ----------------------------------------------------------------------------------------------

REASON = "out_of_memory: out of memory at 1x4x8x8; captures were freed"


class Device:
    """Free memory and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.now = 100 * MIB, 0.0
        self.asked = 0
        self.capture_policy = CapturePolicy(Captures(BUDGET), Stats(), CacheConfig(), self._free)
        monkeypatch.setattr(capture_policy.time, "monotonic", lambda: self.now)

    def _free(self, device: str) -> int:
        self.asked += 1
        return self.free

    def reason(self, key: Any) -> str | None:
        reason = self.capture_policy.reason(key)
        return reason and str(reason)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def key() -> Any:
    return capture_key(FakeProgram(), Module().call())


def test_it_belongs_to_the_device_and_the_shape_not_to_the_epoch(device: Device, key: Any) -> None:
    device.capture_policy.out_of_memory(key)
    assert device.reason(key) == REASON
    assert device.reason(replace(key, epoch=9)) == REASON
    assert device.reason(replace(key, device="cuda:1")) is None
    assert device.reason(capture_key(FakeProgram(), Module().call(16))) is None
    assert device.reason(replace(key, owner=2)) is None
    # Other flags choose other kernels, which may take less memory and gain from a capture.
    assert device.reason(replace(key, torch_flags=(("fp16 accumulation", True),))) is None


def test_it_goes_when_more_memory_is_free(device: Device, key: Any) -> None:
    device.capture_policy.out_of_memory(key)
    device.now, device.free = 2.0, 200 * MIB
    assert device.reason(key) == REASON, "100 MiB more are not enough"
    device.now, device.free = 4.0, 400 * MIB
    assert device.reason(key) is None
    assert device.reason(key) is None


def test_the_device_is_asked_once_a_second(device: Device, key: Any) -> None:
    device.capture_policy.out_of_memory(key)
    device.free, before = 1000 * MIB, device.asked
    for _ in range(50):
        assert device.reason(key) == REASON
    assert device.asked == before
    device.free, device.now = 100 * MIB, 1.5
    for _ in range(50):
        assert device.reason(key) == REASON
    assert device.asked == before + 1


def test_it_is_tried_again_after_five_minutes_however_often_it_failed(device: Device, key: Any) -> None:
    waits = []
    for _ in range(3):
        device.capture_policy.out_of_memory(key)
        started = device.now
        while device.reason(key) is not None:
            device.now += 10.0
        waits.append(device.now - started)
    assert waits == [300.0, 300.0, 300.0]


def test_freed_memory_clears_it_and_a_deleted_module_takes_it_along(device: Device, key: Any) -> None:
    device.capture_policy.out_of_memory(key)
    device.capture_policy.forget(2)
    assert device.reason(key) == REASON
    device.capture_policy.forget(1)
    assert device.reason(key) is None
    device.capture_policy.out_of_memory(key)
    device.capture_policy.memory_was_freed()
    assert device.reason(key) is None


@pytest.mark.parametrize("failure", [oom(), CaptureError("no room")], ids=repr)
def test_a_capture_without_memory_is_not_tried_again_by_a_load_of_the_weights(rig: Rig, failure: Exception) -> None:
    if isinstance(failure, CaptureError):
        failure.__cause__ = oom()
    rig.program.capture_failure = failure
    rig.run()
    rig.program.capture_failure = None
    rig.module.load(7.0)
    with rig.expect({"capture_failed": 1}, graph_calls=1):
        assert rig.run() == 7.0
    rig.cache.trim()
    with rig.expect(graph_calls=1, captures=1):
        assert rig.run() == 7.0


def test_a_capture_that_failed_for_good_is_not_tried_again_when_memory_is_back(rig: Rig) -> None:
    rig.program.capture_failure = CaptureError("not permitted")
    rig.run(8)
    rig.program.capture_failure = None
    rig.run(16)
    rig.program.run_failures = [oom()]
    with rig.expect({"capture_failed": 1, "out_of_memory": 1}, eager_calls=1):
        rig.run(8)
    rig.cache.give_back(everything=True)
    with rig.expect({"capture_failed": 1}, graph_calls=1):
        rig.run(8)


def test_the_reason_is_one_line_of_a_text_of_cuda(rig: Rig) -> None:
    rig.program.capture_failure = RuntimeError("CUDA error: not permitted\nFor debugging consider\nCompile with")
    rig.run()
    reason = rig.cache._capture_policy.reason(capture_key(rig.program, rig.module.call()))
    assert str(reason) == "capture_failed: CUDA error: not permitted"


def test_of_too_many_calls_the_oldest_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_policy, "_MOST_CALLS", 2)
    rig.program.capture_failure = CaptureError("not permitted")
    for side in (8, 16, 24, 16, 24):
        rig.run(side)
    assert rig.program.capture_attempts == 3
    rig.run(8)
    assert rig.program.capture_attempts == 4


# --- a GPU that is busy all the time -------------------------------------------------------------------------------

DAY = 24 * 3600.0


class Start:
    """A process: a new cache, module and program over the same folder."""

    def __init__(self, config: CacheConfig, owner: int = 1) -> None:
        self.cache = GraphCache(config)
        self.module = Module()
        self.program = FakeProgram(owner)
        self.program.capture_failure = NoGainError(0.25)

    def run(self, side: int = 8, **changes: Any) -> None:
        assert answer(self.cache.run(self.program, self.module.call(side, **changes))) == 2.0

    def is_measured(self, side: int = 8, **changes: Any) -> bool:
        before = self.program.capture_attempts
        self.run(side, **changes)
        return self.program.capture_attempts > before


@pytest.fixture
def config(tmp_path: Path) -> CacheConfig:
    return CacheConfig(budget_bytes=BUDGET, store_folder=tmp_path, source="code")


@pytest.fixture
def known(config: CacheConfig) -> CacheConfig:
    """An earlier process measured one size."""
    assert Start(config).is_measured()
    return config


def stored(config: CacheConfig) -> Path:
    assert config.store_folder is not None
    (file,) = (config.store_folder / "captures").iterdir()
    return file


def test_after_a_restart_it_is_not_measured_again(known: CacheConfig) -> None:
    start = Start(known, owner=2)
    with expect(start.cache, graph_calls=3):
        assert not any(start.is_measured() for _ in range(2))
        start.module.epoch += 1
        assert not start.is_measured()
    assert start.is_measured(16), "another size is another choice"


def test_the_file_is_read_in_the_first_call(known: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(known)
    reads: list[Path] = []
    read = codec.read_regular_file
    monkeypatch.setattr(codec, "read_regular_file", lambda path: reads.append(path) or read(path))
    start.run(8)
    assert stored(known) in reads
    reads.clear()
    for side in (16, 8, 16):
        start.run(side)
    assert stored(known) not in reads


def test_with_other_torch_flags_it_is_measured_again(known: CacheConfig) -> None:
    start = Start(known)
    assert start.is_measured(torch_flags=(("fp16 accumulation", True),))


@pytest.mark.parametrize("change", [{"source": "other code"}, {"remember": False}, {"store_folder": None}], ids=str)
def test_with_another_configuration_it_is_measured_again(known: CacheConfig, change: dict[str, Any]) -> None:
    assert Start(replace(known, **change)).is_measured()


def test_on_another_machine_it_is_measured_again(known: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "argv", ["main.py", "--use-sage-attention"])
    assert Start(known).is_measured()


@pytest.mark.parametrize(("days", "measured"), [(6, False), (8, True), (-1, True)])
def test_after_a_week_it_is_measured_again(
    known: CacheConfig, monkeypatch: pytest.MonkeyPatch, days: int, measured: bool
) -> None:
    """A choice that was wrong, because another program kept the GPU busy, does not stay. Clocks may be set back."""
    start = Start(known)
    now = time.time()
    monkeypatch.setattr(capture_policy.time, "time", lambda: now + days * DAY)
    assert start.is_measured() == measured


def test_a_process_that_runs_longer_measures_it_again_after_a_week(
    known: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(known)
    now = time.time()
    assert not start.is_measured()
    monkeypatch.setattr(capture_policy.time, "time", lambda: now + 6 * DAY)
    assert not start.is_measured()
    monkeypatch.setattr(capture_policy.time, "time", lambda: now + 8 * DAY)
    assert start.is_measured()
    assert not start.is_measured()


def test_after_free_graphs_it_is_measured_again_and_a_gain_is_kept_too(known: CacheConfig) -> None:
    start = Start(known)
    assert not start.is_measured()
    start.cache.trim()
    start.program.capture_failure = None
    with expect(start.cache, graph_calls=1, captures=1, replays=2):
        for _ in range(3):
            start.run()
    later = Start(known)
    later.program.capture_failure = None
    with expect(later.cache, graph_calls=1, captures=1):
        later.run()


def test_a_call_that_is_measured_again_without_gain_is_kept_again(known: CacheConfig) -> None:
    start = Start(known)
    start.run()
    start.cache.trim()
    assert start.is_measured()
    assert not Start(known).is_measured()
