"""Compile behind the picture: calls run the originals of regions without code, which come in when they are ready.

A call waits for nothing. It leaves a copy of each such block without its weights. Between two calls, for a tenth of the
time that they take, and in a thread while no prompt runs, this process traces the copies and adds the code that workers
made of others. The next call that comes to the region compares the code with the original, and runs it from then on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ....coming import Coming
from ....config import CacheConfig
from ....errors import BypassReason, first_line
from ....keys import GraphKey
from ....regions.site import Progress, SilentProgress
from ....stats import Stats
from ....torch_facts.out_of_memory import is_out_of_memory
from ....torch_facts.private_names import Loss, lost
from ...base import Call
from ..compile.compiled_region import CompiledRegion
from ..compile.tracing import Shapes, general_hints
from ..regions.region import MadeLater, Region, RegionCall, trace_of, without_model
from ..regions.table import RegionTable
from .job import Job, job_of, settings_for
from .parallel_compile import add
from .pool import WorkerPool, worker_count_behind
from .process import Compiled, HungError, NotCompiledError

logger = logging.getLogger(__name__)

_SHARE = 0.1  # of the time of calls that may go to work in this process
_MOST_SECONDS = 1.0  # of credit
_FIRST_TRACE = 1.0  # seconds: it imports, and later ones take a quarter of it
_IDLE_SECONDS = 0.5  # without a call and without a prompt: then work goes on without credit
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 60.0  # after a lack of memory has ended the workers
_END_SECONDS = 10.0  # that the thread may take to end

# How a region is traced, in turn, until code comes of it that is right: at general sizes or at those of the call; and
# see `size_one_is_general`.
_WAYS = ((True, True), (True, False), (False, True), (False, False))
_AT_SIZES = 2

# A call that ran originals alone: its key and weights epoch, and how much code had come until then.
Waited = tuple[GraphKey, int, int] | None


@dataclass(eq=False)
class _Wanted:
    """A call that left a region. settings: see `settings_for`, as it ran. way: the number of its next one in _WAYS."""

    call: RegionCall
    settings: dict[str, Any]
    way: int = 0

    @property
    def key(self) -> tuple[str, Shapes]:
        return self.call.region.key, self.call.static


class CompilesBehind(MadeLater):
    """The regions of all models that calls left, those in the workers, and the thread that goes on while nothing runs.

    lock: held while a call of a model runs, and while this traces or adds code.
    """

    def __init__(self, table: RegionTable, workers: WorkerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._table, self._workers, self._clock = table, workers, clock
        self._waiting: dict[str, _Wanted] = {}  # by the key of a region
        self._jobs: dict[str, tuple[Compiled, _Wanted]] = {}
        self._next_ways: dict[tuple[str, Shapes], int] = {}  # of code that came, and was not compared yet
        self._held = contextlib.ExitStack()  # the workers, while there is work for them
        self._count, self._is_held, self._is_unable = 0, False, False
        self._stats, self._calls, self._changes = Stats(), 0, 0
        self._progress: Progress = SilentProgress()
        self._credit, self._trace_seconds, self._coming = 0.0, _FIRST_TRACE, Coming()
        self._latest, self._looked, self._paused_until = 0.0, 0.0, 0.0
        self._thread: threading.Thread | None = None
        self._ending, self.lock = threading.Event(), threading.RLock()
        atexit.register(self._end)

    @property
    def left(self) -> int:
        """How many regions wait, or are with the workers."""
        return len(self._waiting.keys() | self._jobs.keys())

    @property
    def coming(self) -> tuple[int, float]:
        """How many regions are left, and in about how many seconds they are there. From any thread."""
        waiting = [each.call.region.label for each in list(self._waiting.values())]
        share = _SHARE if self._progress.prompt_runs() else 1.0
        return self.left, self._coming.seconds(waiting, self._count, share, self._clock())

    def has(self, region: Region) -> bool:
        return region.key in self._waiting or region.key in self._jobs

    def note(self, call: RegionCall, found: CompiledRegion | BypassReason | None) -> None:
        """See `MadeLater`."""
        if found is not None:
            self._next_ways.pop((call.region.key, call.static), None)
            return
        if self._is_unable:
            return
        self._stats, device = call.stats, call.tensors[0].device
        self._coming.device = device.type
        try:
            self._hold(device)
        except OSError as error:
            self._stop(error)
            return
        try:
            wanted = _Wanted(without_model(call), settings_for(device))
        except Exception as error:  # noqa: BLE001 (a class's own code may copy badly; the block runs eagerly, and says why)
            if not is_out_of_memory(error):  # the next call leaves it again
                self._give_up(call, error)
            return
        wanted.way = self._next_ways.pop(wanted.key, 0)
        self._waiting[call.region.key] = wanted
        self._latest = self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="resolute-behind", daemon=True)
            self._thread.start()

    def _hold(self, device: torch.device) -> None:
        if not self._is_held and self._clock() >= self._paused_until:
            self._held.enter_context(self._workers.in_use(self._count, device))
            self._is_held = True

    def _let_go(self) -> None:
        self._is_held = False
        self._held.close()

    def _stop(self, error: Exception) -> None:
        """Have calls wait for their compiles from now on, as without this."""
        logger.warning("Resolute: calls wait for compiles from now on: %s", first_line(error))
        logger.debug("Resolute: why", exc_info=error)
        self._is_unable = True
        self._waiting.clear()
        self._jobs.clear()
        self._let_go()

    def serves(self, call: Call, config: CacheConfig) -> bool:
        """Say if it compiles what a call lacks. If not, the call waits: for example where no worker has room."""
        if not call.is_behind or config.verify or call.weights.streams or self._is_unable:
            return False
        if lost(Loss.WORKERS, Loss.KEEPING):
            return False
        if not self.left:
            self._count = worker_count_behind(config.workers, call.tensors[0].device)
        return self._count > 0

    def has_nothing_for(self, call: Call, latest: Waited) -> bool:
        """No code came since the module's latest call, which was such a one: it may run without any hook."""
        return call.is_behind and bool(self.left) and latest == (call.key, call.epoch, self._changes)

    def advance(self, call: Call, ran_compiled: bool) -> Waited:
        """A call that waits for code has ended: work for as long as there is credit."""
        waited = None if ran_compiled else (call.key, call.epoch, self._changes)
        self._progress = call.progress
        with self._stats.stalling():
            self._work()
        return waited

    def _work(self) -> None:
        now = self._clock()
        self._credit = min(self._credit + _SHARE * max(now - self._latest, 0.0), _MOST_SECONDS)
        while self._credit >= (self._trace_seconds if self._waiting else 0.0) and self._do_one():
            self._credit -= self._clock() - now
            now = self._clock()
        self._latest = self._clock()

    def _go_on(self) -> None:
        """The life of the thread."""
        while not self._ending.wait(_LOOK_SECONDS):
            if self._is_idle() and self.lock.acquire(blocking=False):
                try:
                    if not self.left:
                        self._thread = None
                        self._let_go()
                        return
                    self._do_one()
                finally:
                    self.lock.release()

    def _is_idle(self) -> bool:
        """No prompt runs, and for a while no call was made, through regions, by a replay or eagerly."""
        counters = self._stats.counters
        calls = counters.graph_calls + counters.replays + counters.eager_calls
        if calls != self._calls:
            self._calls, self._looked = calls, self._clock()  # not `_latest`: the next call would get no credit
        return self._clock() - max(self._latest, self._looked) >= _IDLE_SECONDS and not self._progress.prompt_runs()

    def _end(self) -> None:
        """Python ends: a thread that still traces would crash in it."""
        self._ending.set()
        if (thread := self._thread) is not None:
            thread.join(_END_SECONDS)

    def _do_one(self) -> bool:
        """Add code that came, or trace a region. Returns False if there was nothing to do."""
        try:
            return self._do_next()
        except Exception as error:  # noqa: BLE001 (no fault of ours costs a prompt, or ends the thread)
            self._stop(error)
            return False

    def _do_next(self) -> bool:
        if self._clock() < self._paused_until:
            return False
        for key, (result, wanted) in self._jobs.items():
            if result.done():
                del self._jobs[key]
                self._coming.ended(key, self._clock())
                self._take(wanted, result)
                break
        else:
            if not self._waiting:
                return False
            self._trace(next(iter(self._waiting.values())))
        if self._is_held and not self.left:
            self._let_go()
        return True

    def _trace(self, wanted: _Wanted) -> None:
        call, started = wanted.call, self._clock()
        try:
            with torch.no_grad():
                job = _job(wanted)
            self._hold(call.tensors[0].device)
            self._jobs[call.region.key] = self._workers.submit(job), wanted
            del self._waiting[call.region.key]
            self._coming.submitted(call.region.key, call.region.label, self._count, self._clock(), started)
        except Exception as error:  # noqa: BLE001 (it is tried another way, or said why not)
            self._waiting.pop(call.region.key, None)
            self._failed(wanted, error)
        seconds = self._clock() - started
        self._trace_seconds = (self._trace_seconds + seconds) / 2
        call.stats.event("trace", f"{call.region.label} behind the picture", seconds)

    def _take(self, wanted: _Wanted, result: Compiled) -> None:
        """Add what a worker made of a region, or have it tried another way."""
        call = wanted.call
        try:
            artifact, seconds = result.result()
            self._coming.took(call.region.label, seconds)
            with self._table.lock:
                failure = add(call, artifact)
            if failure:
                raise NotCompiledError(failure)
        except HungError as error:
            self._give_up(call, error)
            return
        except Exception as error:  # noqa: BLE001 (it is tried another way, or said why not)
            self._failed(wanted, error)
            return
        self._changes += 1
        self._next_ways[wanted.key] = max(wanted.way + 1, _AT_SIZES)
        call.stats.event("compile", f"{call.region.label} ({call.site.name}) behind the picture", seconds)
        logger.info("Resolute: %s is compiled; %d regions are left", call.region.label, self.left)

    def _failed(self, wanted: _Wanted, error: Exception) -> None:
        if is_out_of_memory(error) or not self._workers.running:  # a lack of memory ends the workers
            self._waiting[wanted.call.region.key] = wanted
            self._paused_until = self._clock() + _PAUSE_SECONDS
            self._let_go()
            return
        wanted.way += 1
        at_sizes_too = wanted.call.sizes != _general(wanted.call)
        if wanted.way < (len(_WAYS) if at_sizes_too else _AT_SIZES):
            self._waiting[wanted.call.region.key] = wanted
        else:
            self._give_up(wanted.call, error)

    def _give_up(self, call: RegionCall, error: Exception) -> None:
        with self._table.lock:
            reason = call.fails(f"{call.region.label}: {first_line(error)}")
        logger.warning("Resolute: %s; it runs eagerly", reason.detail)
        logger.debug("Resolute: why", exc_info=error)
        self._changes += 1


def _general(call: RegionCall) -> dict[str, int]:
    return general_hints(call.sizes, call.tensors[0].device)


def _job(wanted: _Wanted) -> Job:
    call = wanted.call
    is_general, oblivious = _WAYS[wanted.way]
    traced = trace_of(call, _general(call) if is_general else call.sizes, oblivious)
    return job_of(call.region.key, call.region.label, traced, wanted.settings)
