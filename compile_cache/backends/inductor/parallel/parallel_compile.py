"""Compile all missing regions of a call at once, in worker processes.

This process traces the regions and compares each result with the original once, on random inputs (`comparison`): the
real inputs of all regions together do not fit into memory. The workers lower the traces and generate code, which takes
longest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import Any

from ....store.artifact_store import Artifact, InvalidArtifactError
from ....torch_facts.out_of_memory import is_out_of_memory
from ..compile.artifacts import measured, unpack
from ..regions.look_ahead import LookAhead
from ..regions.region import RegionCall, trace_of
from ..regions.table import RegionTable, load_while_waiting
from .comparison import is_right
from .job import Job, job_of, settings_for
from .pool import WorkerPool
from .process import Compiled, HungError, NotCompiledError

logger = logging.getLogger(__name__)

_FEWEST = 2  # regions that are worth starting processes for
_POLL_SECONDS = 0.1  # between two checks for a cancel


def compile_in_parallel(
    missing: Sequence[RegionCall], table: RegionTable, workers: WorkerPool, upcoming: Sequence[LookAhead] = ()
) -> None:
    """Compile the regions of these calls, which have no compiled code, in workers that are in use.

    missing: at least one call, each of another region and all on one device; their tensors need no contents.
    upcoming: decodes that will come soon. Their regions are submitted after those of `missing`, and nothing waits for
        them: the `compile_in_parallel` that has them in `missing` gets their results.

    A region that fails is left as it was; the call that comes to it compiles it, or runs it eagerly where its compile
    hung. Raises NotCompiledError if no process was started, and whatever cancels; then the processes end.
    """
    store, stats, progress = missing[0].store, missing[0].stats, missing[0].progress
    with stats.stalling(), contextlib.ExitStack() as locks:  # also waiting for another process that compiles them
        if store is not None:
            for call in sorted(missing, key=lambda call: call.region.key):  # the same order in all processes
                locks.enter_context(store.build_lock(call.region.key, progress.raise_if_cancelled))
                with table.lock:  # taken after the store's lock, because preloading needs it while we wait for that
                    if not call.region.compiled:
                        load_while_waiting(call)
        # Regions with most weights take longest. They go first, so that the last worker does not finish late.
        missing = sorted((call for call in missing if not call.region.compiled), key=_weights, reverse=True)
        if not missing:
            return
        settings = settings_for(missing[0].tensors[0].device)
        if len(missing) >= _FEWEST or any(workers.early(call.region.key, settings) for call in missing):
            try:
                _run_jobs(missing, table, workers, settings, upcoming)
            except BaseException:  # nobody waits for the jobs now
                workers.close()
                raise


def _weights(call: RegionCall) -> int:
    return len(call.weights)


def _run_jobs(
    missing: Sequence[RegionCall],
    table: RegionTable,
    workers: WorkerPool,
    settings: dict[str, Any],
    upcoming: Sequence[LookAhead],
) -> None:
    stats, progress = missing[0].stats, missing[0].progress
    pending: dict[Compiled, RegionCall] = {}

    def add_what_is_done() -> None:
        for result in [each for each in pending if each.done()]:
            progress.raise_if_cancelled()
            _finish(pending.pop(result), result, table)

    missing[0].announce()
    seconds, traces = 0.0, 0  # without the comparisons
    for call in missing:
        progress.raise_if_cancelled()
        result = workers.early(call.region.key, settings)
        if result is None:
            started = stats.clock()
            job = _job(call, settings)
            if job is None:
                continue
            result = workers.submit(job)
            traces, seconds = traces + 1, seconds + stats.clock() - started
        pending[result] = call
        add_what_is_done()  # now: a region that is saved survives a kill
    stats.event("trace", f"{traces} regions", seconds)
    for _ in _submit_early(upcoming, workers, settings, missing):
        add_what_is_done()
    while pending:
        progress.raise_if_cancelled()
        wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
        add_what_is_done()


def _finish(call: RegionCall, result: Compiled, table: RegionTable) -> None:
    """Add the result of a job that is done to its region.

    A region whose compile hung runs eagerly from now on: compiled in this process, it might hang that.
    """
    try:
        artifact, seconds = result.result()
        with table.lock:
            failure = add(call, artifact)
    except HungError as error:
        failure = str(error)
        with table.lock:
            call.fails(f"{call.site.kind}: {error}")
    except NotCompiledError as error:
        failure = str(error)
    if failure:
        logger.info("Resolute: no worker compiled %s: %s", call.site.kind, failure)
    else:
        call.stats.event("compile", f"{call.site.kind} ({call.site.name})", seconds)
        call.announce()


def _submit_early(
    upcoming: Sequence[LookAhead], workers: WorkerPool, settings: dict[str, Any], missing: Sequence[RegionCall]
) -> Iterator[None]:
    """Trace and submit the regions of other modules, while the workers still compile the missing ones."""
    stats, progress = missing[0].stats, missing[0].progress
    own = {call.region.key for call in missing}
    for look in upcoming:
        started, submitted = stats.clock(), 0
        try:
            for call in sorted(look.missing(), key=_weights, reverse=True):
                progress.raise_if_cancelled()
                if call.region.key not in own and not workers.early(call.region.key, settings):
                    with look.as_loaded():
                        job = _job(call, settings)
                    if job is not None:
                        workers.submit(job, look.owner)
                        submitted += 1
                yield
        except Exception as error:  # the decode itself will show what is wrong, if anything is
            if isinstance(error, progress.cancellations):
                raise
            logger.debug("Resolute: the regions of a module that comes later are unknown", exc_info=error)
        stats.event("trace", f"{submitted} regions of a module that comes later", stats.clock() - started)


def _job(call: RegionCall, settings: dict[str, Any]) -> Job | None:
    """The job of a call's region; None if the region cannot be traced or sent. Raises what cancels."""
    if call.streams and call.traced is None:  # its weights are not here
        return None
    try:
        return job_of(call.region.key, call.region.label, call.traced or trace_of(call), settings)
    except call.progress.cancellations:
        raise
    except Exception as error:
        logger.debug("Resolute: no worker can compile %s", call.site.kind, exc_info=error)
        return None


def add(call: RegionCall, artifact: Artifact) -> str:
    """Add a worker's artifact to the call's region if its results are right. Returns why not, or an empty text.

    Without the memory to compare, or without weights, which stream, it is added all the same, and the call that comes
    to the region compares it.
    """
    region = call.region
    if artifact.key != region.key:
        return "the process that compiles answered with another region"
    try:
        compiled = unpack(artifact)
    except (InvalidArtifactError, OSError) as error:
        return str(error)

    # The worker's artifact: what `unpack` made of it no longer has its shared libraries.
    region.add(compiled, lambda: replace(artifact, about={**artifact.about, **measured(compiled)}))
    if call.streams:
        return ""
    try:
        right = is_right(call, compiled)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.info("Resolute: %s is compared when the call comes to it: memory is short now", call.site.kind)
        return ""
    return "" if right else "its code fails or gives other results than the original"
