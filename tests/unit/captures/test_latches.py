"""A lack of memory keeps a call from being captured until there is more memory, or for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compile_cache.captures.captures import capture_key
from compile_cache.captures.latches import MemoryLatches
from compile_cache.errors import BypassCode, BypassReason, CaptureError

from ..fakes import MIB, FakeProgram, Module, answer, expect, oom

REASON = BypassReason(BypassCode.OUT_OF_MEMORY, "out of memory at 1x4x8x8")


class Device:
    """Free memory and a clock."""

    def __init__(self) -> None:
        self.free, self.now = 100 * MIB, 0.0
        self.asked = 0
        self.latches = MemoryLatches(self._free, lambda: self.now)

    def _free(self, device: str) -> int:
        self.asked += 1
        return self.free


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def key() -> Any:
    return capture_key(FakeProgram(), Module().call())


def test_it_belongs_to_the_device_and_the_shape_not_to_the_epoch(device: Device, key: Any) -> None:
    device.latches.block(key, REASON)
    assert device.latches.reason(key) is REASON
    assert device.latches.reason(replace(key, epoch=9)) is REASON
    assert device.latches.reason(replace(key, device="cuda:1")) is None
    assert device.latches.reason(capture_key(FakeProgram(), Module().call(16))) is None
    assert device.latches.reason(replace(key, owner=2)) is None


def test_it_goes_when_more_memory_is_free(device: Device, key: Any) -> None:
    device.latches.block(key, REASON)
    device.now, device.free = 2.0, 200 * MIB
    assert device.latches.reason(key) is REASON, "100 MiB more are not enough"
    device.now, device.free = 4.0, 400 * MIB
    assert device.latches.reason(key) is None
    assert device.latches.reason(key) is None


def test_the_device_is_asked_once_a_second(device: Device, key: Any) -> None:
    device.latches.block(key, REASON)
    device.free, before = 1000 * MIB, device.asked
    for _ in range(50):
        assert device.latches.reason(key) is REASON
    assert device.asked == before


def test_it_is_tried_again_after_a_while_and_less_often_each_time(device: Device, key: Any) -> None:
    waits = []
    for _ in range(3):
        device.latches.block(key, REASON)
        started = device.now
        while device.latches.reason(key) is not None:
            device.now += 10.0
        waits.append(device.now - started)
    assert waits == [300.0, 600.0, 1200.0]


def test_freed_memory_clears_it_and_a_deleted_module_takes_it_along(device: Device, key: Any) -> None:
    device.latches.block(key, REASON)
    device.latches.forget(2)
    assert device.latches.reason(key) is REASON
    device.latches.forget(1)
    assert device.latches.reason(key) is None
    device.latches.block(key, REASON)
    device.latches.clear()
    assert device.latches.reason(key) is None


@pytest.mark.parametrize("failure", [oom(), CaptureError("no room")], ids=repr)
def test_a_capture_without_memory_is_not_tried_again_by_a_load_of_the_weights(
    cache: Any, program: Any, module: Any, failure: Exception
) -> None:
    if isinstance(failure, CaptureError):
        failure.__cause__ = oom()
    program.capture_failure = failure
    cache.run(program, module.call())
    program.capture_failure = None
    module.load(7.0)
    with expect(cache, {"capture_failed": 1}, graph_calls=1):
        assert answer(cache.run(program, module.call())) == 7.0
    cache.trim()
    with expect(cache, graph_calls=1, captures=1):
        assert answer(cache.run(program, module.call())) == 7.0
