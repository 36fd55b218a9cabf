"""An estimate of when the regions that are compiled behind the picture are there. Plain data: no torch, no ComfyUI."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_TRACE = 0.25  # seconds
_LEAST = 0.25  # of a job is left while it runs
_KEPT = 9  # latest seconds of each kind


@dataclass(slots=True)
class _Job:
    label: str
    begun: float | None  # None: no worker has it yet


class CompileEta:
    """The jobs that workers have, in their order, and what earlier ones took. Times are on the caller's clock.

    One thread tells it of jobs; any thread may ask meanwhile. label: the kind of block that a region is made of.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}  # by key of a region, the oldest first
        self._took: dict[str, tuple[float, ...]] = {}  # by label
        self._traces: tuple[float, ...] = (_TRACE, _TRACE)  # the first one imports, and should not count alone

    def traced(self, seconds: float) -> None:
        """A trace for workers took so long."""
        self._traces = (*self._traces, seconds)[-_KEPT:]

    def submitted(self, key: str, label: str, workers: int, now: float) -> None:
        """Workers got a job, or this process began it: a worker alone."""
        running = sum(job.begun is not None for job in self._jobs.values())
        self._jobs[key] = _Job(label, now if running < workers else None)

    def took(self, label: str, seconds: float) -> None:
        """A job compiled its region."""
        self._took[label] = (*self._took.get(label, ()), seconds)[-_KEPT:]

    def ended(self, key: str, now: float) -> None:
        """A job is over, or failed, and its worker begins the next one."""
        self._jobs.pop(key, None)
        following = next((each for each in self._jobs.values() if each.begun is None), None)
        if following is not None:
            following.begun = now

    def seconds(self, waiting: Sequence[str], workers: int, share: float, now: float) -> float | None:
        """How long until the jobs are over, and those of regions that are not traced yet, by their labels; None before
        any job of this process ended: nothing tells what one takes.

        share: of this process's time, goes to traces.
        """
        jobs = list(self._jobs.values())  # a copy: another thread may add one
        took = dict(self._took)
        every = [each for some in took.values() for each in some]
        if not every:
            return None if jobs or waiting else 0.0
        usual = median(every)
        ends = sorted(self._of(job.label, took, usual, now - job.begun) for job in jobs if job.begun is not None)
        free = [0.0] * (max(workers, 1) - len(ends)) + ends  # when each worker has nothing to do, the soonest first
        trace = median(self._traces) / share
        left = [(0.0, job.label) for job in jobs if job.begun is None]
        left += [((number + 1) * trace, label) for number, label in enumerate(waiting)]
        for traced, label in left:
            heapq.heapreplace(free, max(free[0], traced) + self._of(label, took, usual))
        return max(free, default=0.0)

    @staticmethod
    def _of(label: str, took: dict[str, tuple[float, ...]], usual: float, elapsed: float = 0.0) -> float:
        """Of a job that runs so long, what is left; one that takes longer than others did is about to end."""
        seconds = median(took[label]) if label in took else usual
        return max(seconds - elapsed, _LEAST * seconds)
