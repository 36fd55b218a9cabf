"""An estimate of when the regions that compile in the background are ready. Plain data: no torch, no ComfyUI."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_TRACE = 0.25  # seconds
_LEAST = 0.25  # share of a job's usual seconds that counts as left, at least, while it runs
_KEPT = 9  # latest durations of each kind


@dataclass(slots=True)
class _Job:
    label: str
    begun: float | None  # None: no worker has begun it


class CompileEta:
    """The workers' jobs, in order, and the durations of earlier ones. Times are on the caller's clock.

    One thread reports jobs; any thread may ask for the estimate. label: the kind of block that a region is made of.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}  # by key of the region, the oldest first
        self._took: dict[str, tuple[float, ...]] = {}  # by label
        self._traces: tuple[float, ...] = (_TRACE, _TRACE)  # the first trace also imports, so it must not count alone

    def record_trace(self, seconds: float) -> None:
        """Record the seconds of one trace for workers."""
        self._traces = (*self._traces, seconds)[-_KEPT:]

    def record_submit(self, key: str, label: str, workers: int, now: float) -> None:
        """Record a job that was submitted to workers, or that this process begins itself as the only worker."""
        running = sum(job.begun is not None for job in self._jobs.values())
        self._jobs[key] = _Job(label, now if running < workers else None)

    def record_compile(self, label: str, seconds: float) -> None:
        """Record the seconds in which a job compiled its region."""
        self._took[label] = (*self._took.get(label, ()), seconds)[-_KEPT:]

    def record_end(self, key: str, now: float) -> None:
        """Record that a job ended or failed. Its worker begins the next one."""
        self._jobs.pop(key, None)
        following = next((each for each in self._jobs.values() if each.begun is None), None)
        if following is not None:
            following.begun = now

    def seconds(self, waiting: Sequence[str], workers: int, share: float, now: float) -> float | None:
        """Return the seconds until all jobs have ended, including those of the regions `waiting` for a trace (their
        labels). None before any job of this process has ended, because no duration is known.

        share: the share of this process's time that traces get.
        """
        jobs = list(self._jobs.values())  # a copy: another thread may add one
        took = dict(self._took)
        every = [each for some in took.values() for each in some]
        if not every:
            return None if jobs or waiting else 0.0
        usual = median(every)
        ends = sorted(self._of(job.label, took, usual, now - job.begun) for job in jobs if job.begun is not None)
        free = [0.0] * (max(workers, 1) - len(ends)) + ends  # when each worker becomes free, the soonest first
        trace = median(self._traces) / share
        left = [(0.0, job.label) for job in jobs if job.begun is None]
        left += [((number + 1) * trace, label) for number, label in enumerate(waiting)]
        for traced, label in left:
            heapq.heapreplace(free, max(free[0], traced) + self._of(label, took, usual))
        return max(free, default=0.0)

    @staticmethod
    def _of(label: str, took: dict[str, tuple[float, ...]], usual: float, elapsed: float = 0.0) -> float:
        """Return the seconds left of a job that ran for `elapsed`; one that outlasts earlier jobs is about to end."""
        seconds = median(took[label]) if label in took else usual
        return max(seconds - elapsed, _LEAST * seconds)
