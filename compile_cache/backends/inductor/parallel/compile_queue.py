"""The queue of regions that have no code. Calls run originals in their place, and leave them here.

A call leaves a copy of each such block without its weights. This process traces the copies and workers compile them,
which `behind` does for calls that wait for nothing, and `awaited` for those that wait. The next call that comes to a
region compares its code with the original, and runs it from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from ....attribute_policy import ModuleAttributePolicy
from ....coming import Coming
from ....config import CacheConfig
from ....errors import BypassReason, first_line
from ....regions.site import SilentProgress
from ....regions.skeleton import skeleton_of
from ....stats import Stats
from ....torch_facts.out_of_memory import is_out_of_memory
from ..compile.compiled_region import CompiledRegion
from ..compile.tracing import Shapes
from ..regions.region import MadeLater, Region, RegionCall, trace_of, without_contents
from ..regions.table import RegionTable
from .failures import HungError, KilledError, NeedsGpuError, NotCompiledError, OtherEnvironmentError
from .held_workers import HeldWorkers
from .job import Job, job_of, settings_for
from .pool import WorkerPool
from .process import Compiled
from .wanted import AT_SIZES, WAYS, Wanted

logger = logging.getLogger(__name__)

_FIRST_TRACE = 1.0  # seconds: it imports, and later ones take a quarter of it


class Waiter(Protocol):
    """A call that waits for what it leaves."""

    def leaves(self, key: str, device: torch.device) -> None:
        """It left the region with this key."""
        ...

    def has_left(self, key: str) -> bool: ...


class CompileQueue(MadeLater):
    """The regions of all models that calls left, and those in the workers. Not thread-safe.

    waiting, jobs: by the key of a region. changes: how much code came, or was given up. trace_seconds: about what the
    next trace takes. coming: an estimate of when they are there. waiter: the current call, if it waits; on_left: called
    when another call left a region.
    """

    def __init__(self, table: RegionTable, workers: WorkerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.table, self.workers, self.clock = table, workers, clock
        self.waiting: dict[str, Wanted] = {}
        self.jobs: dict[str, tuple[Compiled, Wanted]] = {}
        self._need_gpu: set[str] = set()  # keys of regions that no worker can compile
        self._next_ways: dict[tuple[str, Shapes], int] = {}  # of code that came, and was not compared yet
        self.held, self.is_unable = HeldWorkers(workers, clock), False
        self._differed = False  # the latest worker that answered had another environment
        self.stats, self.changes, self.trace_seconds = Stats(), 0, _FIRST_TRACE
        self.coming = Coming()
        self.waiter: Waiter | None = None
        self.on_left: Callable[[], None] = lambda: None
        self._config = CacheConfig()
        self._settings: dict[torch.device, dict[str, Any]] = {}  # of the current call: to read them takes milliseconds

    def begin(self, config: CacheConfig) -> None:
        """A call begins."""
        self._config, self._settings = config, {}

    @property
    def left(self) -> int:
        """How many regions wait, or are with the workers."""
        return len(self.waiting.keys() | self.jobs.keys())

    @property
    def _where(self) -> str:
        """Added to the texts of events."""
        return " behind the picture" if self.waiter is None else ""

    def has(self, region: Region) -> bool:
        return region.key in self.waiting or region.key in self.jobs

    def leaves_to_calls(self, region: Region) -> bool:
        """See `MadeLater`."""
        return region.key in self._need_gpu

    def note(self, call: RegionCall, found: CompiledRegion | BypassReason | None, is_foreseen: bool = False) -> None:
        """See `MadeLater`. A call that waits leaves nothing else: its workers end with it."""
        if found is not None:
            self._next_ways.pop((call.region.key, call.static), None)
            return
        region, key = call.region, call.region.key
        if is_foreseen:
            if self.waiter or self.has(region) or key in self._need_gpu:
                return
            if call.store is not None:
                self.table.preload(key, call.store)
            if region.compiled or region.failures:
                return
        self.stats, device = call.stats, call.tensors[0].device
        self.coming.device = device.type
        if self.is_unable or not self._may_have_workers(key, device):
            return
        try:
            if device not in self._settings:
                self._settings[device] = settings_for(device)
            copied = _without_model(call, self._config.attribute_policy)
        except Exception as error:  # noqa: BLE001 (a class's own code may copy badly; the block runs eagerly, and says why)
            if not is_out_of_memory(error):  # the next call leaves it again
                self._give_up(call, error)
            return
        wanted = Wanted(copied, self._settings[device], len(call.weights), is_foreseen=is_foreseen)
        wanted.way = self._next_ways.pop(wanted.key, 0)
        self.waiting[key] = wanted
        if self.waiter is None:
            self.on_left()

    def _may_have_workers(self, key: str, device: torch.device) -> bool:
        """Say if there is a processor for some. Those for a call that waits start at once, others with the first trace:
        while they start they slow the prompt beside them.
        """
        if self.waiter is not None:
            self.waiter.leaves(key, device)
            return True
        return bool(self.left) or self.held.plan(self._config.workers, anew=True)

    def _stop(self, error: Exception) -> None:
        """Have calls wait for their compiles from now on, as without this."""
        logger.warning("Resolute: calls wait for compiles from now on: %s", first_line(error))
        logger.debug("Resolute: why", exc_info=error)
        self.is_unable = True
        self.waiting.clear()
        self.jobs.clear()
        self.held.let_go()

    def take_back(self) -> None:
        """Have the regions in the workers wait again, and let the workers go."""
        taken = [key for key, (result, _) in self.jobs.items() if not result.done()]
        self._wait_again(taken)
        self.held.let_go(at_once=bool(taken))

    def hand_over(self, keys: frozenset[str]) -> None:
        """A call compiles these in turn: keep what came of them, and have no worker compile the others beside it."""
        if keys.isdisjoint(self.waiting.keys() | self.jobs.keys()):
            return
        self.take_back()
        while self.jobs and self.do_one():
            pass
        self.drop(keys - self.jobs.keys())

    def _wait_again(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.waiting[key] = self.jobs.pop(key)[1]
            self.coming.ended(key, self.clock())

    def drop(self, keys: Iterable[str]) -> bool:
        """Forget regions. Returns whether workers still have some of them."""
        is_unfinished = False
        for key in keys:
            self.waiting.pop(key, None)
            is_unfinished |= self.jobs.pop(key, None) is not None
            self.coming.ended(key, self.clock())
        return is_unfinished

    def do_one(self) -> bool:
        """Add code that came, or trace a region. Returns False if there was nothing to do."""
        try:
            return self._do_next()
        except Exception as error:  # noqa: BLE001 (no fault of ours costs a prompt, or ends the thread)
            self._stop(error)
            return False

    def _do_next(self) -> bool:
        if self.held.are_paused:
            return False
        for key, (result, wanted) in self.jobs.items():
            if result.done():
                del self.jobs[key]
                self.coming.ended(key, self.clock())
                self._take(wanted, result)
                break
        else:
            keys = [key for key, each in self.waiting.items() if self.held.may_serve(each.device)]
            key = min(keys, key=lambda key: self.waiting[key].is_foreseen, default="")
            if key:
                self._trace(self.waiting[key])
        left = [*self.waiting.values(), *[wanted for _, wanted in self.jobs.values()]]
        if all(each.device != self.held.device for each in left):
            self.held.let_go()  # for what is left of another device
        return bool(key)

    def _trace(self, wanted: Wanted) -> None:
        call, started = wanted.call, self.clock()
        self.held.hold(wanted.device)  # they start meanwhile
        try:
            with torch.no_grad():
                job = _job(wanted)
            self.jobs[call.region.key] = self.workers.submit(job), wanted
            del self.waiting[call.region.key]
            self.coming.submitted(call.region.key, call.region.label, self.held.count, self.clock(), started)
        except Exception as error:  # noqa: BLE001 (it is tried another way, or said why not)
            self.waiting.pop(call.region.key, None)
            self._failed(wanted, error)
        seconds = self.clock() - started
        self.trace_seconds = (self.trace_seconds + seconds) / 2
        call.stats.event("trace", call.region.label + self._where, seconds)

    def _take(self, wanted: Wanted, result: Compiled) -> None:
        """Add what a worker made of a region, or have it tried another way."""
        call = wanted.call
        try:
            artifact, seconds = result.result()
            self.coming.took(call.region.label, seconds)
            if artifact.key != call.region.key:
                raise NotCompiledError("the process that compiles answered with another region")
            with self.table.lock:
                call.region.add_made(artifact, call.store)
        except HungError as error:
            self._give_up(call, error)
            return
        except NeedsGpuError as error:
            logger.info("Resolute: %s is compiled by a later call: %s", call.region.label, first_line(error))
            self._need_gpu.add(call.region.key)
            self.changes += 1
            return
        except OtherEnvironmentError as error:  # no fault of the region
            self._renew_workers(wanted, error)
            return
        except Exception as error:  # noqa: BLE001 (it is tried another way, or said why not)
            self._failed(wanted, error)
            return
        self.changes, self._differed = self.changes + 1, False
        self._next_ways[wanted.key] = max(wanted.way + 1, AT_SIZES)
        call.stats.event("compile", f"{call.region.label} ({call.site.name}){self._where}", seconds)
        logger.info("Resolute: %s is compiled; %d regions are left", call.region.label, self.left)

    def _renew_workers(self, wanted: Wanted, error: OtherEnvironmentError) -> None:
        """Start workers anew, for all that these have. If new ones differ too, this process compiles."""
        logger.info("Resolute: workers are started anew: %s", first_line(error))
        self.waiting[wanted.call.region.key] = wanted
        self.workers.close()
        self._wait_again([key for key, (each, _) in self.jobs.items() if not each.done() or each.exception()])
        self.held.let_go()
        if self._differed:
            self._stop(error)
        self._differed = True

    def _failed(self, wanted: Wanted, error: Exception) -> None:
        is_killed = isinstance(error, KilledError)
        is_fault = is_killed and wanted.was_killed  # of the code: the system killed it once at most
        wanted.was_killed = wanted.was_killed or is_killed
        is_short = is_out_of_memory(error) or not self.workers.running  # the system ended them, for their memory
        if not is_fault and (is_killed or is_short):
            self.waiting[wanted.call.region.key] = wanted
            if is_short:
                self.held.pause()
            return
        if wanted.goes_another_way():
            self.waiting[wanted.call.region.key] = wanted
        elif self.waiter is not None and self.waiter.has_left(wanted.call.region.key):  # it compiles that itself
            logger.info("Resolute: no worker compiled %s: %s", wanted.call.region.label, first_line(error))
        else:
            self._give_up(wanted.call, error)

    def _give_up(self, call: RegionCall, error: Exception) -> None:
        with self.table.lock:
            reason = call.fails(f"{call.region.label}: {first_line(error)}")
        logger.warning("Resolute: %s; it runs eagerly", reason.detail)
        logger.debug("Resolute: why", exc_info=error)
        self.changes += 1


def _without_model(call: RegionCall, policy: ModuleAttributePolicy) -> RegionCall:
    """The call with a copy of the block without weights, inputs without contents, and nothing that holds the model."""
    site = replace(call.site, module=skeleton_of(call.site.module, policy), others=None)
    kept = replace(call, site=site, weights=(), tensors=without_contents(call.tensors))
    return replace(kept, progress=SilentProgress(), announce=lambda: None)


def _job(wanted: Wanted) -> Job:
    call = wanted.call
    is_general, oblivious = WAYS[wanted.way]
    traced = trace_of(call, wanted.general if is_general else call.sizes, oblivious)
    return job_of(call.region.key, call.region.label, traced, wanted.settings)
