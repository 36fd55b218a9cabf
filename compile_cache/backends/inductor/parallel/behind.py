"""Compile behind the picture: calls run the originals of regions without code, which come in when they are ready.

A call waits for nothing. It leaves a copy of each such block without its weights. Between two calls, for a tenth of the
time that they take, and in a thread while no prompt runs, this process traces the copies and adds the code that workers
made of others. The next call that comes to the region compares the code with the original, and runs it from then on.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ....attribute_policy import ModuleAttributePolicy
from ....config import CacheConfig
from ....errors import BypassReason, first_line
from ....keys import GraphKey
from ....regions.site import Progress, SilentProgress
from ....regions.skeleton import skeleton_of
from ....stats import Stats
from ....torch_facts.out_of_memory import is_out_of_memory
from ....torch_facts.private_names import Loss, lost
from ...base import Call
from ..compile.compiled_region import CompiledRegion
from ..compile.tracing import Shapes
from ..regions.region import MadeLater, Region, RegionCall, for_later, trace_of
from ..regions.table import RegionTable
from .held_workers import HeldWorkers
from .job import Job, job_of, settings_for
from .parallel_compile import add
from .pool import WorkerPool
from .process import Compiled, HungError, KilledError, NotCompiledError
from .wanted import AT_SIZES, WAYS, Wanted

logger = logging.getLogger(__name__)

_SHARE = 0.1  # of the time of calls that may go to work in this process
_MOST_SECONDS = 1.0  # of credit
_FIRST_TRACE = 1.0  # seconds: it imports, and later ones take a quarter of it
_IDLE_SECONDS = 0.5  # without a call and without a prompt: then work goes on without credit
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0  # that the thread may take to end

# A call that ran originals alone: its key and weights epoch, and how much code had come until then.
Waited = tuple[GraphKey, int, int] | None


class CompilesBehind(MadeLater):
    """The regions of all models that calls left, those in the workers, and the thread that goes on while nothing runs.

    lock: held while a call of a model runs, and while this traces or adds code.
    """

    def __init__(self, table: RegionTable, workers: WorkerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._table, self._workers, self._clock = table, workers, clock
        self._waiting: dict[str, Wanted] = {}  # by the key of a region
        self._jobs: dict[str, tuple[Compiled, Wanted]] = {}
        self._next_ways: dict[tuple[str, Shapes], int] = {}  # of code that came, and was not compared yet
        self._held, self._is_unable = HeldWorkers(workers, clock), False
        self._config = CacheConfig()
        self._stats, self._calls, self._changes = Stats(), 0, 0
        self._progress: Progress = SilentProgress()
        self._credit, self._trace_seconds = 0.0, _FIRST_TRACE
        self._latest, self._looked = 0.0, 0.0
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.lock = threading.RLock()
        atexit.register(self._end)

    @property
    def left(self) -> int:
        """How many regions wait, or are with the workers."""
        return len(self._waiting) + len(self._jobs)

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
        try:
            if not self.left and not self._held.plan(self._config.workers, device, anew=True):
                return
            if self._held.may_serve(device, is_idle=False):  # they take seconds to start
                self._held.hold(device)
        except OSError as error:
            self._stop(error)
            return
        try:
            wanted = Wanted(_without_model(call, self._config.attribute_policy), settings_for(device))
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

    def _stop(self, error: Exception) -> None:
        """Have calls wait for their compiles from now on, as without this."""
        logger.warning("Resolute: calls wait for compiles from now on: %s", first_line(error))
        logger.debug("Resolute: why", exc_info=error)
        self._is_unable = True
        self._waiting.clear()
        self._jobs.clear()
        self._held.let_go()

    def serves(self, call: Call, config: CacheConfig) -> bool:
        """Say if it compiles what a call lacks. If not, the call waits: for example where no processor is left."""
        if self._held.only_idle:
            self._make_way()
        if not call.is_behind or config.verify or call.weights.streams or self._is_unable:
            return False
        if lost(Loss.WORKERS, Loss.KEEPING):
            return False
        self._config = config
        return self._held.plan(config.workers, call.tensors[0].device)

    def has_nothing_for(self, call: Call, latest: Waited) -> bool:
        """No code came since the module's latest call, which was such a one: it may run without any hook."""
        if self._held.only_idle:
            self._make_way()
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
            is_idle = self._is_idle()
            if (is_idle or self._held.only_idle) and self.lock.acquire(blocking=False):
                try:
                    if not is_idle:
                        self._make_way()
                    elif self.left:
                        self._do_one(is_idle=True)
                    else:
                        self._thread = None
                        self._held.let_go()
                        return
                finally:
                    self.lock.release()

    def _is_idle(self) -> bool:
        """No prompt runs, and for a while no call was made, through regions, by a replay or eagerly."""
        counters = self._stats.counters
        calls = counters.graph_calls + counters.replays + counters.eager_calls
        if calls != self._calls:
            self._calls, self._looked = calls, self._clock()  # not `_latest`: the next call would get no credit
        return self._clock() - max(self._latest, self._looked) >= _IDLE_SECONDS and not self._progress.prompt_runs()

    def _make_way(self) -> None:
        """A prompt begins: workers that have no room beside it end now, and what they had waits again."""
        if not self._held.only_idle:
            return
        for key in [key for key, (result, _) in self._jobs.items() if not result.done()]:
            self._waiting[key] = self._jobs.pop(key)[1]
        self._held.let_go()

    def _end(self) -> None:
        """Python ends: a thread that still traces would crash in it, and workers would go on with what they do."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(_END_SECONDS)
        self._workers.close()

    def _do_one(self, is_idle: bool = False) -> bool:
        """Add code that came, or trace a region. is_idle: no prompt runs. Returns False if there was nothing to do."""
        try:
            return self._do_next(is_idle)
        except Exception as error:  # noqa: BLE001 (no fault of ours costs a prompt, or ends the thread)
            self._stop(error)
            return False

    def _do_next(self, is_idle: bool) -> bool:
        if self._held.are_paused:
            return False
        for key, (result, wanted) in self._jobs.items():
            if result.done():
                del self._jobs[key]
                self._take(wanted, result)
                break
        else:
            devices = {each.device for each in self._waiting.values()}
            served = [device for device in devices if self._held.may_serve(device, is_idle)]
            key = next((key for key, each in self._waiting.items() if each.device in served), "")
            if key:
                self._trace(self._waiting.pop(key))
        left = [*self._waiting.values(), *[wanted for _, wanted in self._jobs.values()]]
        if all(each.device != self._held.device for each in left):
            self._held.let_go()  # for what is left of another device
        return bool(key)

    def _trace(self, wanted: Wanted) -> None:
        call, started = wanted.call, self._clock()
        try:
            with torch.no_grad():
                job = _job(wanted)
            self._held.hold(wanted.device)
            self._jobs[call.region.key] = self._workers.submit(job), wanted
        except Exception as error:  # noqa: BLE001 (it is tried another way, or said why not)
            self._failed(wanted, error)
        seconds = self._clock() - started
        self._trace_seconds = (self._trace_seconds + seconds) / 2
        call.stats.event("trace", f"{call.region.label} behind the picture", seconds)

    def _take(self, wanted: Wanted, result: Compiled) -> None:
        """Add what a worker made of a region, or have it tried another way."""
        call = wanted.call
        try:
            artifact, seconds = result.result()
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
        self._next_ways[wanted.key] = max(wanted.way + 1, AT_SIZES)
        call.stats.event("compile", f"{call.region.label} ({call.site.name}) behind the picture", seconds)
        logger.info("Resolute: %s is compiled; %d regions are left", call.region.label, self.left)

    def _failed(self, wanted: Wanted, error: Exception) -> None:
        is_killed = isinstance(error, KilledError)
        is_fault = is_killed and wanted.was_killed  # of the code: the system killed it once at most
        wanted.was_killed = wanted.was_killed or is_killed
        is_short = is_out_of_memory(error) or not self._workers.running  # a lack of memory ends the workers
        if not is_fault and (is_killed or is_short):
            self._waiting[wanted.call.region.key] = wanted
            if is_short:
                self._held.pause()
            return
        if wanted.goes_another_way():
            self._waiting[wanted.call.region.key] = wanted
        else:
            self._give_up(wanted.call, error)

    def _give_up(self, call: RegionCall, error: Exception) -> None:
        with self._table.lock:
            reason = call.fails(f"{call.region.label}: {first_line(error)}")
        logger.warning("Resolute: %s; it runs eagerly", reason.detail)
        logger.debug("Resolute: why", exc_info=error)
        self._changes += 1


def _without_model(call: RegionCall, policy: ModuleAttributePolicy) -> RegionCall:
    """The call with a copy of the block without weights, inputs without contents, and nothing that holds the model.

    Its weights are not here later, as those that stream, so the next call compares what is made of it.
    """
    site = replace(call.site, module=skeleton_of(call.site.module, policy))
    kept = replace(for_later(call), site=site, weights=(), streams=True)
    return replace(kept, progress=SilentProgress(), announce=lambda: None)


def _job(wanted: Wanted) -> Job:
    call = wanted.call
    is_general, oblivious = WAYS[wanted.way]
    traced = trace_of(call, wanted.general if is_general else call.sizes, oblivious)
    return job_of(call.region.key, call.region.label, traced, wanted.settings)
