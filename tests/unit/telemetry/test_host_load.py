"""How much of the host's time work beside calls takes, by a clock of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from compile_cache.telemetry import host_load
from compile_cache.telemetry.host_load import HostLoad

from ...programs import wait_for


class Host:
    """A load whose clock is the test's; `slept` seconds of it went to pauses."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, 0.0
        self.load = HostLoad(lambda: self.now, self.sleep)
        self.load.prompt_runs = lambda: True

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.05, "a call that begins meanwhile waits for the end of the pause"
        self.now += seconds
        self.slept += seconds

    def share(self, host_share: float | None, part: float = 0.004, parts: int = 500) -> float:
        """Of the time beside calls that keep the host busy for so much, the share that work in small parts takes."""
        self.slept = 0.0
        with self.load.working():
            for _ in range(parts):
                self.load.record_call(host_share)
                self.now += part
                self.load.rest()
        return part * parts / (part * parts + self.slept)


@pytest.mark.parametrize(
    ("host_share", "share"),
    [(0.0, 0.8), (0.1, 0.8), (0.5, 0.5), (0.9, 0.1), (1.0, 0.08), (7.0, 0.08), (None, 0.08)],
)
def test_work_takes_what_calls_leave_and_a_twelfth_at_least(host_share: float | None, share: float) -> None:
    host = Host()
    host.load.record_call(host_share)
    assert host.load.spare == pytest.approx(share)
    assert host.share(host_share) == pytest.approx(share, abs=0.01)


def test_a_long_part_is_paid_for_by_many_short_pauses() -> None:
    host = Host()
    with host.load.working():
        for seconds in (1.0, *[1e-6] * 300):
            host.now += seconds
            host.load.record_call(None)
            host.load.rest()
    assert host.slept == pytest.approx(11.5, abs=0.06)


@pytest.mark.parametrize("host_share", [0.0, None])
def test_while_a_prompt_does_something_else_work_takes_a_fifth_and_without_a_prompt_all(
    host_share: float | None,
) -> None:
    host = Host()
    host.load.record_call(host_share)
    host.now += 0.5
    assert host.load.spare == 0.2
    host.load.prompt_runs = lambda: False
    assert (host.load.spare, host.share(None)) == (1.0, 1.0)


def test_while_a_call_waits_for_the_work_it_takes_all_of_the_time() -> None:
    host = Host()
    host.now += 0.5
    with host.load.claims_suspended():
        assert host.share(None) == 1.0
    assert host.share(None) == pytest.approx(0.08, abs=0.01)


def test_nothing_is_owed_for_an_earlier_piece_of_work() -> None:
    host = Host()
    host.load.record_call(None)
    with host.load.working():
        host.now += 10.0
        host.load.rest()
    slept = host.slept
    with host.load.working():
        host.load.rest()
    assert host.slept == slept


class Worker:
    """A thread that works in small parts until the end of the test."""

    def __init__(self, load: HostLoad) -> None:
        self.load, self.parts, self.ends = load, 0, False
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        while not self.ends:
            with self.load.working():
                for _ in range(10):
                    self.parts += 1
                    self.load.rest()

    @property
    def works(self) -> bool:
        before = self.parts
        time.sleep(0.05)
        return self.parts > before


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(HostLoad())
    wait_for(lambda: made.parts > 0)
    yield made
    made.ends = True
    made.thread.join(10)
    assert not made.thread.is_alive()


def test_a_call_that_claims_the_host_has_it_alone(worker: Worker) -> None:
    with worker.load.claimed():
        assert not worker.works
        with worker.load.claimed():
            assert not worker.works
        assert not worker.works, "the outer one goes on"
    assert worker.works


def test_a_call_that_waits_for_the_work_claims_nothing_meanwhile(worker: Worker) -> None:
    with worker.load.claims_suspended():
        assert worker.works
    with worker.load.claimed():
        with worker.load.claims_suspended():
            assert worker.works
        assert not worker.works
    assert worker.works


def test_a_call_waits_only_a_moment_for_work_that_cannot_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_load, "_PATIENCE", 0.02)
    host = Host()
    with host.load.working():
        began = time.monotonic()
        with host.load.claimed():
            pass
        assert 0.02 <= time.monotonic() - began < 5.0
    with host.load.claimed():
        pass
