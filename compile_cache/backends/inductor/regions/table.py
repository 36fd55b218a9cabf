"""All regions of the process: sites of equal structure, in whatever model, share one `Region` and its compiled code."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading

from ....errors import BypassCode, BypassReason, RegionCompileError, first_line
from ....stats import SHORT_WAIT
from ....store.artifact_store import ArtifactStore
from ....torch_facts.out_of_memory import is_out_of_memory
from ..compile.artifacts import pack
from ..compile.compiled_region import CompiledRegion
from ..compile.lowering import compile_trace
from ..compile.tracing import Shapes, general_hints
from .numerics_check import run_original
from .region import Region, RegionCall, may_run, trace_of

logger = logging.getLogger(__name__)

# If a region was compiled more often than this, something defeats its dynamic dimensions.
_MOST_COMPILED = 8


class RegionTable:
    """The regions by key. Thread-safe; hold `lock` to add to a region or to load code."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self.lock = threading.RLock()

    def region(self, key: str, label: str, form: tuple[str, ...]) -> Region:
        with self.lock:
            region = self._regions.setdefault(key, Region(key, label))
            region.label, region.form = label, form  # `preload` knows only the key
            return region

    @property
    def ready_forms(self) -> frozenset[tuple[str, ...]]:
        """Forms of the regions that have code, whatever model came to them."""
        return frozenset(region.form for region in list(self._regions.values()) if region.is_ready)

    @property
    def compiled_keys(self) -> frozenset[str]:
        """Keys of the regions that have code in memory."""
        return frozenset(key for key, region in list(self._regions.items()) if region.is_ready)

    def preload(self, key: str, store: ArtifactStore) -> int:
        """Load a region from the store unless it is in memory. Returns the number of artifacts that it loaded."""
        with self.lock:
            region = self._regions.setdefault(key, Region(key, ""))
            return 0 if region.compiled else region.load(store)

    def resolve(self, call: RegionCall, is_queued: bool = False) -> CompiledRegion | BypassReason | None:
        """Find code for the call's sizes in memory or in the store, or compile it. Returns the code, or the reason for
        which the original runs.

        is_queued: return None instead of compiling, as the queue does that.

        Raises torch's OutOfMemoryError, and whatever cancels.
        """
        region, shapes = call.region, call.shapes
        with call.stats.stalling(), contextlib.ExitStack() as held:  # for all of it, comparisons too
            with call.stats.stall("load", "regions that were being loaded", SHORT_WAIT):
                held.enter_context(self.lock)  # after a start, `preload` holds it to load regions
            if shapes in region.by_shapes:
                return region.by_shapes[shapes]
            if not call.fits:
                return _refuse(region, shapes, f"{region.label}: inputs {shapes} do not fit {call.site.dims}")
            compiled = _find_in_memory(call) or _find_in_store(call)
            if compiled is not None:
                region.by_shapes[shapes] = compiled
                return compiled
            if call.static in region.failures:
                return region.by_shapes.setdefault(shapes, region.failures[call.static])
            if len(region.compiled) >= _MOST_COMPILED:
                return _refuse(region, shapes, f"{region.label} was compiled {_MOST_COMPILED} times already")
            if is_queued:
                return None
            return region.by_shapes.setdefault(shapes, _compile_or_explain(call))

    def refuse(self, region: Region, shapes: Shapes, error: BaseException) -> BypassReason:
        """The code failed when it ran: from now on the original runs at these sizes."""
        with self.lock:
            return _refuse(region, shapes, f"{region.label} failed at {shapes}: {error}")


def load_while_waiting(call: RegionCall) -> bool:
    """`Region.load` while a prompt waits for it, so the time is counted. Returns whether it loaded anything."""
    if call.store is None:
        return False
    region, stats = call.region, call.stats
    started = stats.clock()
    with stats.stalling("load"):
        loaded = region.load(call.store)
    if loaded:
        stats.counters.region_loads += loaded
        stats.event("load", region.label, stats.clock() - started)
    return loaded > 0


def _find_in_store(call: RegionCall) -> CompiledRegion | None:
    return _find_in_memory(call) if load_while_waiting(call) else None


def _find_in_memory(call: RegionCall) -> CompiledRegion | None:
    same = [compiled for compiled in call.region.compiled if compiled.static == call.static]
    return next((compiled for compiled in same if may_run(call, compiled)), None)


def _compile_or_explain(call: RegionCall) -> CompiledRegion | BypassReason:
    """Compile; where another process compiles the same region, wait for its artifact instead."""
    call.progress.raise_if_cancelled()
    call.announce()
    try:
        if call.store is None:
            return _compile_and_compare(call)
        with call.store.build_lock(call.region.key, call.progress.raise_if_cancelled):
            return _find_in_store(call) or _compile_and_compare(call)
    except RegionCompileError as error:
        # Inputs that the original refuses too (a text for another model) are no failure of the compiler: raise.
        run_original(call.site, call.tensors)
        logger.warning("Resolute: %s; it runs eagerly", error, exc_info=logger.isEnabledFor(logging.DEBUG))
        return call.fails(str(error))


def _compile_and_compare(call: RegionCall) -> CompiledRegion:
    """Compile for general sizes; only if the result is wrong at the call's sizes, for these."""
    sizes = call.sizes
    general = general_hints(sizes, call.tensors[0].device)
    for hints in [general] if general == sizes else [general, sizes]:
        compiled = _compile(call, hints)
        call.region.add(compiled, functools.partial(pack, call.region.key, call.region.label, compiled))
        if may_run(call, compiled):
            call.announce()
            return compiled
    raise RegionCompileError(call.site.kind, AssertionError("its code fails or gives other results than the original"))


def _compile(call: RegionCall, hints: dict[str, int]) -> CompiledRegion:
    """Trace and lower. Raises RegionCompileError where torch cannot, OutOfMemoryError, and whatever cancels."""
    site, stats = call.site, call.stats
    started = stats.clock()
    failures: list[Exception] = []
    for oblivious in (True, False):
        try:
            compiled = compile_trace(trace_of(call, hints, oblivious), keep=call.store is not None)
            break
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, call.progress.cancellations):
                raise
            failures.append(error)
    else:
        raise RegionCompileError(site.kind, failures[0]) from failures[0]
    stats.event("compile", f"{site.kind} ({site.name})", stats.clock() - started)
    return compiled


def _refuse(region: Region, shapes: Shapes, detail: str) -> BypassReason:
    logger.warning("Resolute: %s; it runs eagerly", detail)
    reason = BypassReason(BypassCode.COMPILE_FAILED, detail)
    region.by_shapes[shapes] = reason
    return reason


def why_failed(call: RegionCall, error: Exception) -> BypassReason:
    """Why a site runs its original until the next call of the module. Raises whatever cancels. What the original raises
    by itself it raises again.
    """
    kind = call.site.kind
    if isinstance(error, call.progress.cancellations):
        raise error
    if is_out_of_memory(error):
        detail = f"there is no memory to load {kind} and compare it with its original; it runs eagerly until then"
        return BypassReason(BypassCode.OUT_OF_MEMORY, detail)
    logger.debug("Resolute: %s runs eagerly", kind, exc_info=error)
    return BypassReason(BypassCode.COMPILE_FAILED, f"{kind}: {type(error).__name__}: {first_line(error)}")
