"""The work on the queue: trace regions and submit them to workers, or compile here; add results and retry failures."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....errors import first_line
from ....torch_compat.out_of_memory import is_out_of_memory
from ..lower import operators
from ..lower.artifacts import pack, unpack
from ..lower.lowering import compile_trace
from ..lower.tracing import Trace
from ..regions.region import trace_of
from .described_gpu import why_not
from .failures import HungError, KilledError, NeedsGpuError, NotCompiledError, NoWorkersError, OtherEnvironmentError
from .job import job_of
from .process import Compiled
from .task import AT_SIZES, CompileTask
from .task_list import TaskList, nothing

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two checks for code that another process compiles, and after a cancelled trace
_MEMORY_SECONDS = 60.0  # before a compile that ran out of memory is retried
_MOST_ENDS = 3  # times that all workers may end in a row without compiling anything


class CompileWork:
    """The work on one queue, in small pieces. Each piece runs in the thread that calls `step`."""

    def __init__(self, tasks: TaskList) -> None:
        self._tasks, self._driving = tasks, threading.RLock()
        self._local_keys: set[str] = set()  # keys of regions that no worker can compile
        self._differed = False  # the latest answer came from a worker with another environment
        self._ends = 0  # times that all workers ended since the last compiled region

    def step(self, compile_local: bool, compile_all: bool = False, yield_point: Callable[[], None] = nothing) -> bool:
        """Add one compiled region, or submit or compile one. Returns False if there was nothing to do.

        compile_local: this process may compile regions that no worker can. compile_all: this process compiles every
        region that no worker has. yield_point: called between two small parts of the work.
        """
        with self._driving:
            try:
                return self._step(compile_local or compile_all, compile_all, yield_point)
            except Exception as error:  # noqa: BLE001 (no fault of ours costs a prompt, or ends the thread)
                self._stop(error)
                return False
            finally:
                with self._tasks.lock:
                    self._tasks.at_work = None
                    devices = {task.device for task in self._tasks.tasks}
                    if self._tasks.lease.device not in devices:
                        self._tasks.lease.release()  # so that workers can start for another device's regions

    def _step(self, compile_local: bool, compile_all: bool, yield_point: Callable[[], None]) -> bool:
        with self._tasks.lock:
            ended = next((key for key, (result, _) in self._tasks.jobs.items() if result.done()), "")
            job = self._tasks.jobs.pop(ended, None)
            task = None if job else self._next_task(compile_local, compile_all)
            self._tasks.at_work = ended or (task.key if task else None)
            if task:
                del self._tasks.waiting[task.key]
                task.found_no_memory = False
        if job:
            self._tasks.eta.record_end(ended, self._tasks.clock())
            self._take(job[1], job[0])
            return True
        if task is None:
            return False
        try:
            if not self._locks(task):
                return True
            if compile_all or self._is_local(task):
                self._compile(task, yield_point)
            else:
                self._submit(task, yield_point)
        except task.call.progress.cancellations:  # the trace consumed the prompt's cancellation: raise it there again
            task.not_before = self._tasks.clock() + _LOOK_SECONDS
            self._wait_again(task)
            task.call.progress.cancel_again()
        except Exception as error:  # noqa: BLE001 (`_failed` retries the task, or reports why not)
            self._failed(task, error)
        return True

    def _next_task(self, compile_local: bool, compile_all: bool) -> CompileTask | None:
        def can_be_done(task: CompileTask) -> bool:
            if compile_all:
                return True
            return compile_local if self._is_local(task) else self._tasks.lease.may_serve(task.device)

        now = self._tasks.clock()
        ready = [task for task in self._tasks.waiting.values() if task.not_before <= now and can_be_done(task)]
        return min(ready, key=lambda task: task.order, default=None)

    def _is_local(self, task: CompileTask) -> bool:
        """True if only this process can compile the task."""
        if self._tasks.has_no_workers or task.key in self._local_keys or why_not(task.device):
            return True
        return self._tasks.lease.count == 0

    def _locks(self, task: CompileTask) -> bool:
        """Lock the region. False if another process has compiled it (the code is loaded), or compiles it (wait)."""
        store = task.call.store
        if store is None or task.lock is not None:
            return True
        task.lock = store.build_lock(task.key)
        with self._tasks.table.lock:
            loaded = task.call.region.load(store)
        if loaded:
            task.call.stats.counters.region_loads += loaded
            task.unlock()
        elif task.lock is None:
            task.not_before = self._tasks.clock() + _LOOK_SECONDS
            self._wait_again(task)
        return task.lock is not None

    def _submit(self, task: CompileTask, yield_point: Callable[[], None]) -> None:
        started = self._tasks.clock()
        try:
            self._tasks.lease.acquire(task.device, self._tasks.left)  # workers start while this process traces
        except OSError as error:
            raise NoWorkersError(first_line(error)) from error
        trace = traced(task, yield_point)
        operators.prepare(trace.graph.graph)
        try:
            job = job_of(task.key, task.call.region.label, trace, task.settings)
        except Exception as error:  # torch's pickler raises any class
            raise NeedsGpuError(f"its trace cannot be sent to another process: {first_line(error)}") from error
        with self._tasks.lock:
            self._tasks.jobs[task.key] = self._tasks.lease.submit(job), task
        now, label = self._tasks.clock(), task.call.region.label
        self._tasks.eta.record_trace(now - started)
        self._tasks.eta.record_submit(task.key, label, self._tasks.lease.count, now)
        task.call.stats.event("trace", label, now - started)

    def _compile(self, task: CompileTask, yield_point: Callable[[], None]) -> None:
        started = self._tasks.clock()
        self._tasks.eta.record_submit(task.key, task.call.region.label, 1, started)
        try:
            compile_here(task, yield_point, self._tasks.table.lock)
        finally:
            self._tasks.eta.record_end(task.key, self._tasks.clock())
        self._finished(task, self._tasks.clock() - started)

    def _take(self, task: CompileTask, result: Compiled) -> None:
        """Add the region that a worker compiled, or retry the task."""
        call = task.call
        try:
            artifact, seconds = result.result()
            if artifact.key != task.key:
                raise NotCompiledError("the process that compiles answered with another region")
            compiled = unpack(artifact)  # outside the lock, so that no call waits for it
            with self._tasks.table.lock:
                call.region.add_made(artifact, compiled, call.shapes, call.store)
        except Exception as error:  # noqa: BLE001 (`_failed` retries the task, or reports why not)
            self._failed(task, error)
            return
        self._differed, self._ends = False, 0
        self._finished(task, seconds)

    def _finished(self, task: CompileTask, seconds: float) -> None:
        task.unlock()
        call = task.call
        self._tasks.eta.record_compile(call.region.label, seconds)
        self._tasks.next_strategies[task.attempt_key] = max(task.strategy + 1, AT_SIZES)
        call.stats.event("compile", f"{call.region.label} ({call.site.name})", seconds)
        logger.info("Resolute: %s is compiled; %d regions are left", call.region.label, self._tasks.left - 1)

    # --- failures --------------------------------------------------------------------------------------------------

    def _failed(self, task: CompileTask, error: Exception) -> None:
        """Decide how to retry a task, or give it up. All retries are decided here."""
        is_killed, is_hung = isinstance(error, KilledError), isinstance(error, HungError)
        is_fault = is_hung or (is_killed and task.was_killed)  # the first kill may be the system's, short of memory
        task.was_killed = task.was_killed or is_killed
        # All workers ended: the system killed them for their memory.
        ended = isinstance(error, NotCompiledError) and not self._tasks.lease.are_running
        if isinstance(error, OtherEnvironmentError):  # not the region's fault
            self._renew_workers(task, error)
        elif isinstance(error, NeedsGpuError):
            logger.info("Resolute: %s is compiled by this process: %s", task.call.region.label, first_line(error))
            self._local_keys.add(task.key)
            self._wait_again(task)
        elif isinstance(error, NoWorkersError):
            self._stop(error)
            self._wait_again(task)
        elif not is_fault and (is_killed or ended or is_out_of_memory(error)):
            self._ends += ended and not self._tasks.lease.are_paused
            if self._ends >= _MOST_ENDS:
                self._stop(error)
            elif not is_killed or ended:
                self._tasks.lease.pause()
            if is_out_of_memory(error):
                task.not_before, task.found_no_memory = self._tasks.clock() + _MEMORY_SECONDS, True
            self._wait_again(task)
        elif not is_hung and task.takes_next_strategy():
            self._wait_again(task)
        else:
            self._tasks.give_up(task.call, error)
            task.unlock()

    def _wait_again(self, *tasks: CompileTask) -> None:
        with self._tasks.lock:
            for task in tasks:
                self._tasks.waiting[task.key] = task

    def _renew_workers(self, task: CompileTask, error: OtherEnvironmentError) -> None:
        """Restart the workers, and queue their tasks again. If new workers differ too, this process compiles."""
        logger.info("Resolute: workers are started anew: %s", first_line(error))
        self._wait_again(task)
        self._tasks.lease.release(at_once=True)
        with self._tasks.lock:
            again = [key for key, (each, _) in self._tasks.jobs.items() if not each.done() or each.exception()]
            self._wait_again(*[self._tasks.jobs.pop(key)[1] for key in again])
        for key in again:
            self._tasks.eta.record_end(key, self._tasks.clock())
        if self._differed:
            self._stop(error)
        self._differed = True

    def _stop(self, error: Exception) -> None:
        """Stop using workers: from now on this process compiles, while no prompt runs."""
        logger.warning("Resolute: no worker processes compile: %s", first_line(error))
        logger.debug("Resolute: why", exc_info=error)
        self._tasks.has_no_workers = True
        self._tasks.lease.release()
        with self._tasks.lock:
            self._wait_again(*[task for _, task in self._tasks.jobs.values()])
            self._tasks.jobs.clear()


def traced(task: CompileTask, yield_point: Callable[[], None]) -> Trace:
    """Trace the task by its strategy. yield_point: called between two operators. Raises the block's own errors."""
    with torch.no_grad():
        return trace_of(task.call, task.hints, task.is_oblivious, yield_point)


def compile_here(task: CompileTask, yield_point: Callable[[], None], lock: AbstractContextManager[Any]) -> None:
    """Compile the task in this process and add the code to its region; the next call compares it. lock: the table's.
    Raises torch's errors.
    """
    call = task.call
    compiled = compile_trace(traced(task, yield_point), keep=call.store is not None)
    with lock:
        call.region.add(compiled, functools.partial(pack, call.region.key, call.region.label, compiled), call.shapes)
