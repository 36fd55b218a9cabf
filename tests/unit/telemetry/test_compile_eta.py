"""How long until regions are compiled behind the picture, against jobs that really take so long."""

from __future__ import annotations

import pytest

from compile_cache.telemetry.compile_eta import CompileEta

SHARE = 0.1


class Machine:
    """Traces regions one after the other, and compiles them in workers, on a clock of its own."""

    def __init__(self, workers: int = 2, trace: float = 0.3) -> None:
        self.eta, self.workers, self.trace = CompileEta(), workers, trace
        self.now, self.names = 100.0, 0
        self.estimates: list[tuple[float, float]] = []  # (when, seconds)

    def compile(self, kinds: dict[str, float], each: int, share: float = 1.0) -> list[float]:
        """Compile `each` regions of each kind, which take so many seconds. Returns by how much each estimate was
        too long, until the last fifth of the time: what runs then is about to end.
        """
        waiting = [kind for _ in range(each) for kind in kinds]
        free, ends = [self.now] * self.workers, {}
        begun, self.estimates, traced = self.now, [], self.now
        events: list[tuple[float, str, str]] = []
        for kind in waiting:
            traced += self.trace / share
            free.sort()
            ends[name := f"{kind}{self.names}"] = free[0] = max(free[0], traced) + kinds[kind]
            self.names += 1
            events += [(traced, name, "traced"), (ends[name], name, "ended")]
        for when, name, what in sorted(events):
            while self.now < when:
                self._estimate(waiting, share)
                self.now = min(self.now + 1.0, when)
            if what == "traced":
                kind = waiting.pop(0)
                self.eta.record_trace(self.trace)
                self.eta.record_submit(name, kind, self.workers, when)
            else:
                self.eta.record_end(name, when)
                self.eta.record_compile(kind := name.rstrip("0123456789"), kinds[kind])
        assert self.eta.seconds([], self.workers, share, self.now) == 0
        return [seconds / (self.now - at) for at, seconds in self.estimates if self.now - at > 0.2 * (self.now - begun)]

    def _estimate(self, waiting: list[str], share: float) -> None:
        seconds = self.eta.seconds(waiting, self.workers, share, self.now)
        if seconds is not None:
            self.estimates.append((self.now, seconds))


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("share", [1.0, SHARE])
@pytest.mark.parametrize("other", [{"Block": 12.0}, {"Block": 9.0, "Resample": 2.0}, {"Other": 6.0}])
def test_on_the_second_model_no_estimate_is_off_by_two_times(
    workers: int, share: float, other: dict[str, float]
) -> None:
    machine = Machine(workers)
    machine.compile({"Block": 10.0, "Resample": 3.0}, 4)
    factors = machine.compile(other, 5, share)
    assert len(factors) > 3
    assert 0.5 < min(factors) <= max(factors) < 2.0


def test_before_a_job_ended_nothing_tells_what_one_takes() -> None:
    eta = CompileEta()
    assert eta.seconds([], 2, 1.0, 0.0) == 0.0
    assert eta.seconds(["Block"], 2, 1.0, 0.0) is None
    for name in "abc":
        eta.record_submit(name, "Block", 2, 0.0)
    assert eta.seconds([], 2, 1.0, 300.0) is None, "on a busy machine the first job may take minutes"
    eta.record_end("a", 300.0)
    eta.record_compile("Block", 20.0)
    assert eta.seconds([], 2, 1.0, 300.0) == 20.0, "the third begins, and takes as long"


def test_traces_that_get_a_share_of_the_time_are_what_takes_longest() -> None:
    eta = CompileEta()
    for seconds, trace in (3.0, 0.25), (0.5, 0.375), (0.5, 0.5):
        eta.record_trace(seconds)
        eta.record_submit("a", "Block", 16, seconds)
        eta.record_end("a", 6.0)
        eta.record_compile("Block", 5.0)
        assert eta.seconds(["Block"] * 10, 16, SHARE, 6.0) == pytest.approx(10 * trace / SHARE + 5)


def test_a_job_that_failed_tells_no_seconds() -> None:
    eta = CompileEta()
    eta.record_submit("a", "Block", 1, 0.0)
    eta.record_end("a", 1.0)
    eta.record_submit("b", "Block", 1, 1.0)
    assert eta.seconds([], 1, 1.0, 1.0) is None
