"""The first call of a model: look at all of its regions, then compile them at once.

Without this each region is compiled when the call comes to it, one after the other. Each is compared with its original
once, on random inputs of the sizes that were seen: the real ones of all regions do not fit into memory together.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ....regions.dummy_inputs import dummy_input
from ....regions.region import Progress, RegionSite
from ....stats import Stats
from ....store.artifact_store import Artifact, ArtifactStore, InvalidArtifactError
from ..compile.artifacts import measured, unpack
from ..compile.tracing import bind_dims, region_format, trace
from ..compile.variant import Shapes
from ..regions.table import (
    RegionGroup,
    RegionTable,
    Request,
    general_hints,
    inductor_options,
    may_run,
    save,
    static_sizes,
    take_from,
)
from .job import Job, job_of, settings_for
from .pool import WorkerPool

logger = logging.getLogger(__name__)

_FEWEST = 3  # regions that are worth starting processes for


@dataclass(frozen=True, eq=False)
class Seen:
    """A region that a call came to, the weights of its block, and its inputs without their memory."""

    group: RegionGroup
    site: RegionSite
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    @property
    def shapes(self) -> Shapes:
        return tuple(tuple(tensor.shape) for tensor in self.tensors)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """The same in everything but its contents, which take no memory."""
    return tensor.new_empty((1,) * tensor.ndim).expand(tensor.shape)


def build(
    seen: Sequence[Seen],
    table: RegionTable,
    workers: WorkerPool,
    store: ArtifactStore | None,
    stats: Stats,
    progress: Progress,
    announce: Callable[[int, int, str], None],
) -> None:
    """Compile what has no artifact, with workers that were called up. What fails is compiled when the call comes to it.

    announce: (done, of how many, kind). Raises what cancels.
    """
    device = seen[0].tensors[0].device
    with contextlib.ExitStack() as held:
        if store is not None:
            for each in sorted(seen, key=lambda each: each.group.key):  # one order for all processes
                held.enter_context(store.build_lock(each.group.key, progress.raise_if_cancelled))
                with table.lock:  # not while the store's is awaited: regions are loaded ahead meanwhile
                    if not each.group.variants:
                        take_from(store, each.group, stats)
        missing = sorted((each for each in seen if not each.group.variants), key=_weights, reverse=True)
        if len(missing) < _FEWEST:
            return
        started = time.perf_counter()
        announce(0, len(missing), "all at once")
        done = 0
        with contextlib.closing(
            workers.answers(_jobs(missing, device, stats, progress), settings_for(device))
        ) as answers:
            for answer in answers:
                progress.raise_if_cancelled()
                if answer is None:
                    continue
                number, artifact, seconds = answer
                each = missing[number]
                done += 1
                with table.lock:
                    failure = artifact if isinstance(artifact, str) else _taken(each, artifact, store, stats, progress)
                if failure:
                    logger.info("Resolute: %s was not compiled ahead: %s", each.site.kind, failure)
                    continue
                stats.counters.region_compiles += 1
                stats.event("compile", f"{each.site.kind} ({each.site.name})", seconds)
                announce(done, len(missing), each.site.kind)
        stats.counters.stall_seconds += time.perf_counter() - started


def _weights(each: Seen) -> int:
    """How many a region has: those with most take longest. Traced first, they begin while others are traced, and what
    has to wait until a process is free again is short.
    """
    return len(each.weights)


def _taken(each: Seen, artifact: Artifact, store: ArtifactStore | None, stats: Stats, progress: Progress) -> str:
    """Put an artifact where the call will find it. Returns what is wrong with it, or nothing.

    Where there is no memory to compare it now, the call compares it.
    """
    try:
        variant = unpack(artifact)
    except InvalidArtifactError as error:
        return str(error)

    def keep() -> None:  # as it came: what was loaded lacks what only a store needs
        if store is not None:
            save(store, each.group, replace(artifact, about={**artifact.about, **measured(variant)}))

    each.group.add(variant, keep)
    sizes = bind_dims(each.site.dims, each.shapes)
    assert sizes is not None, "it was a job"
    try:
        inputs = [dummy_input(was.shape, was.dtype, was.device, region_format(was)) for was in each.tensors]
        request = Request(each.site, each.weights, inputs, stats, progress, announce=lambda: None, store=store)
        right = may_run(each.group, variant, request, sizes)
    except torch.cuda.OutOfMemoryError:
        logger.info("Resolute: %s is compared when the call comes to it: memory is short now", each.site.kind)
        return ""
    return "" if right else "its results differ from the original's"


def _jobs(missing: Sequence[Seen], device: torch.device, stats: Stats, progress: Progress) -> Iterator[tuple[int, Job]]:
    started = time.perf_counter()
    for number, each in enumerate(missing):
        progress.raise_if_cancelled()
        site = each.site
        sizes = bind_dims(site.dims, each.shapes)
        if sizes is None:
            continue
        hints = general_hints(sizes, device)
        try:
            traced = trace(site.function, site.module, each.tensors, site.dims, hints, True, site.without)
            static = static_sizes(site, each.shapes)
            job = job_of(each.group.key, each.group.label, traced, static, inductor_options(device))
        except progress.cancellations:
            raise
        except Exception as error:
            logger.debug("Resolute: %s cannot be compiled ahead", site.kind, exc_info=error)
            continue
        yield number, job
    stats.event("trace", f"{len(missing)} regions", time.perf_counter() - started)
