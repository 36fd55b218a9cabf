"""A call that waits for its regions: its first run leaves them to the queue, and its second one has their code."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from types import TracebackType

import torch

from ....errors import first_line
from ....regions.site import Progress
from ...base import Call
from ..regions.region import RegionCall
from ..regions.table import RegionTable, load_while_waiting
from .compile_queue import CompileQueue

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1  # between two looks for a cancel


class AwaitedCall:
    """While it is entered, the queue's regions come from this call, and many workers may start for it.

    count: of them. What no worker compiled is not in the queue after it: the call compiles that.
    """

    def __init__(self, queue: CompileQueue, call: Call, count: int) -> None:
        self._queue, self._call, self._count = queue, call, count
        self._keys: set[str] = set()
        self._has_workers = False

    def __enter__(self) -> AwaitedCall:
        self._queue.waiter = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        queue = self._queue
        queue.waiter = None
        if queue.drop(self._keys):  # nobody waits for it now
            queue.workers.close()
        if self._has_workers:
            queue.held.let_go()

    def leaves(self, key: str, device: torch.device) -> None:
        """See `Waiter`."""
        self._keys.add(key)
        self._start_workers(device)

    def has_left(self, key: str) -> bool:
        return key in self._keys

    def _start_workers(self, device: torch.device) -> None:
        """Once. Where there is none, the call compiles what it left."""
        if self._has_workers:
            return
        self._has_workers = True
        self._queue.take_back()  # those few that work beside a model that samples
        try:
            self._queue.held.hold_for(self._count, device)
        except Exception as error:
            logger.warning("Resolute: no worker processes were started: %s", first_line(error))
            logger.debug("Resolute: why", exc_info=True)

    def finish(self, keys: Iterable[str], announce: Callable[[], None]) -> None:
        """Wait until workers compiled the regions with these keys, which the call came to. Raises what cancels.

        announce: shows how many are compiled.
        """
        queue, progress, wanted_keys = self._queue, self._call.progress, frozenset(keys)
        with queue.stats.stalling(), contextlib.ExitStack() as locks:  # also waiting for another process
            for key, wanted in sorted(queue.waiting.items()):  # the same order in all processes
                if key in self._keys and _is_made_elsewhere(wanted.call, locks, queue.table, progress):
                    del queue.waiting[key]
            left = [*queue.waiting.values(), *[wanted for _, wanted in queue.jobs.values()]]
            for wanted in left:
                if wanted.call.region.key in wanted_keys:  # perhaps left by an earlier call, which started a few
                    self._start_workers(wanted.device)
            # Regions with most weights take longest. They go first, so that the last worker does not finish late.
            order = sorted(queue.waiting.items(), key=lambda each: (each[0] not in wanted_keys, -each[1].weights))
            queue.waiting = dict(order)
            announce()
            changes = queue.changes
            while queue.held.device is not None and not wanted_keys.isdisjoint(
                queue.waiting.keys() | queue.jobs.keys()
            ):
                progress.raise_if_cancelled()
                if not queue.do_one():
                    wait([result for result, _ in queue.jobs.values()], _POLL_SECONDS, FIRST_COMPLETED)
                if queue.changes != changes:
                    changes = queue.changes
                    announce()


def _is_made_elsewhere(call: RegionCall, locks: contextlib.ExitStack, table: RegionTable, progress: Progress) -> bool:
    """Lock the region for this process. Returns whether another one stored its code meanwhile, and loads that."""
    if call.store is None:
        return False
    locks.enter_context(call.store.build_lock(call.region.key, progress.raise_if_cancelled))
    with table.lock:  # taken after the store's lock, because preloading needs it while we wait for that
        return not call.region.compiled and load_while_waiting(call)
