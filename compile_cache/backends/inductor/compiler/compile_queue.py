"""The compile queue: regions without code. Calls run the originals of these regions and queue them here.

A call queues a copy of each such block without its weights. This process traces the copies, and workers compile them;
this process compiles what no worker can. The thread of `background` works on the queue beside calls, and a call that
waits for its code works on it too. The next call that reaches a region compares its code with the original.

Lock order: GraphCache's lock, which a call holds; the lock of `CompileWork`, held for one piece of work; the table's;
the queue's, held for a moment. So the thread never makes a call wait for a trace or a compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait

import torch

from ....modules.site import Progress
from ..regions.region import DeferredCompiler
from ..regions.table import RegionTable
from .described_gpu import why_not
from .pool import WorkerPool
from .task_list import TaskList, nothing
from .work import CompileWork

_POLL_SECONDS = 0.1  # between two checks for a cancellation


class CompileQueue(TaskList, DeferredCompiler):
    """The tasks, and the work on them."""

    def __init__(self, table: RegionTable, workers: WorkerPool, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(table, workers, clock)
        self.work = CompileWork(self)

    def workers_for(self, device: torch.device) -> int:
        """The number of workers that may compile for a device."""
        return 0 if self.has_no_workers or why_not(device) else self.lease.plan(self._config.workers)

    def finish(self, keys: Iterable[str], progress: Progress, announce: Callable[[], None] = nothing) -> None:
        """Work on the queue until the regions with these keys are compiled. Raises cancellations; then the remaining
        regions are compiled in the background.

        announce: shows the number of compiled regions.
        """
        wanted, left = frozenset(keys), -1
        self.try_again(wanted)
        few = self.lease.plan(self._config.workers) < 2  # a single worker only adds its start-up time
        with self.stats.stalling(), self.stats.host.claims_suspended():
            while count := self._count(wanted):
                progress.raise_if_cancelled()
                if count != left:
                    left = count
                    announce()
                if not self.work.step(compile_local=True, compile_all=few or self.lease.are_paused):
                    with self.lock:
                        results = [result for result, _ in self.jobs.values()]
                    wait(results, _POLL_SECONDS, FIRST_COMPLETED) if results else time.sleep(_POLL_SECONDS)
            announce()

    def _count(self, wanted: frozenset[str]) -> int:
        """The number of these regions that are being compiled, without those that ran out of memory."""
        with self.lock:
            short = {key for key, task in self.waiting.items() if task.found_no_memory}
            return len(wanted & self._keys() - short)
