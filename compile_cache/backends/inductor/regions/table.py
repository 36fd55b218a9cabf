"""All regions of the process. Sites of equal structure, also in different models, share one `Region` and its code."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

from ....errors import BypassCode, BypassReason, NotComparedError, first_line
from ....store.artifact_store import Artifact, ArtifactStore
from ....telemetry.stats import SHORT_WAIT
from ....torch_compat.out_of_memory import is_out_of_memory
from ..lower.compiled_region import CompiledRegion
from ..lower.shape_guards import Verdict
from ..lower.tracing import Shapes
from .numerics_check import difference_from_original
from .region import COMPARED_IN, MOST_APPLICATIONS, Region, RegionCall

logger = logging.getLogger(__name__)

# With more pieces of confirmed code for a region, or of others, something defeats its dynamic dimensions.
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
        """Forms of the regions that have code, over all models."""
        return frozenset(region.form for region in list(self._regions.values()) if region.is_ready)

    @property
    def compiled_keys(self) -> frozenset[str]:
        """Keys of the regions that have code in memory."""
        return frozenset(key for key, region in list(self._regions.items()) if region.is_ready)

    @property
    def failed(self) -> list[str]:
        """One sentence for each region that could not be compiled: why not."""
        return [reason.detail for each in list(self._regions.values()) for reason in list(each.failures.values())[:1]]

    def retry_failed(self) -> None:
        """Forget all failures to compile and to run, so that the next call tries again."""
        with self.lock:
            for region in self._regions.values():
                region.failures.clear()
                region.dropped = 0
                found = region.by_shapes.items()
                region.by_shapes = {shapes: each for shapes, each in found if isinstance(each, CompiledRegion)}

    def preload(self, key: str, store: ArtifactStore) -> int:
        """Load a region from the store unless it is in memory. Returns the number of artifacts loaded."""
        with self.lock:
            region = self._regions.setdefault(key, Region(key, ""))
            return 0 if region.compiled else region.load(store)

    def resolve(self, call: RegionCall) -> CompiledRegion | BypassReason | None:
        """Look up code for the call's sizes in memory and in the store. Returns the code, or the reason to run the
        original; None if the region must be compiled.

        Raises torch's OutOfMemoryError, NotComparedError, and cancellations.
        """
        region, shapes = call.region, call.shapes
        with call.stats.stalling(), contextlib.ExitStack() as held:  # held for the comparisons too
            with call.stats.stall("load", "regions that were being loaded", SHORT_WAIT):
                held.enter_context(self.lock)  # `preload` holds the lock while it loads regions after a start
            if shapes in region.by_shapes:
                return region.by_shapes[shapes]
            if not call.fits:
                why = f"{region.label}: inputs {shapes} are empty or do not fit {call.site.dims}"
                return _refuse(region, shapes, why)
            compiled = _find_in_memory(call) or (_load(call) and _find_in_memory(call))
            if compiled:
                region.remember(shapes, compiled)
                return compiled
            if call.static in region.failures:
                region.remember(shapes, region.failures[call.static])
                return region.failures[call.static]
            others = len(region.unverified) + region.dropped
            if max(len(region.compiled) - len(region.unverified), others) >= _MOST_COMPILED:
                return _refuse(region, shapes, f"{region.label} was compiled {_MOST_COMPILED} times already")
            return None

    def refuse(self, region: Region, shapes: Shapes, error: BaseException) -> BypassReason:
        """Record that the code raised `error`: from now on the original runs at these shapes. Returns the reason."""
        with self.lock:
            return _refuse(region, shapes, f"{region.label} failed at {shapes}: {error}")


def _load(call: RegionCall) -> bool:
    """Run `Region.load` and count its time as a stall of the prompt. Returns True if it loaded anything."""
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


def _find_in_memory(call: RegionCall) -> CompiledRegion | None:
    same = call.region.usable(call.static, call.shapes)
    if len(same) > 1:  # try code whose guards hold first: other code must be compared
        same.sort(key=lambda compiled: compiled.guards.check(call.sizes)[0] is not Verdict.HOLDS)
    return next((compiled for compiled in same if _validate(call, compiled)), None)


def _validate(call: RegionCall, compiled: CompiledRegion) -> bool:
    """Decide whether compiled code of the region may run at the call's sizes. If so, store new code.

    Drops wrong code. But code whose guards fail here may be right at the sizes that it was made for, and stays for
    these. Raises torch's OutOfMemoryError if memory does not suffice to compare, NotComparedError if too few values are
    finite, and cancellations. The code then stays unverified, and the next call compares it.
    """
    region = call.region
    unverified = region.unverified.get(compiled)
    allowed = _allowed(call, compiled, call.verify or unverified is not None)
    if not allowed and (verdict := compiled.guards.check(call.sizes)[0]) is not Verdict.HOLDS:
        if verdict is Verdict.UNPROVEN:
            compiled.confirmed.distrust()
        if verdict is Verdict.BROKEN or unverified is None or unverified.made_for != call.shapes:
            region.exclude(compiled, call.shapes)
            return False
    if unverified is None:
        return allowed
    del region.unverified[compiled]
    if allowed:
        call.stats.counters.region_compiles += not unverified.is_loaded
        is_known = (store := call.store) is not None and region.keep(
            store, lambda: _compared(unverified.artifact(), store.application)
        )
    else:
        region.drop(compiled)
        is_known = not unverified.was_compared  # else it may be right in the other application
    if call.store is not None and unverified.stored and is_known:
        call.store.remove(unverified.stored)
    return allowed


def _compared(artifact: Artifact, application: str) -> Artifact:
    others = [each for each in artifact.about.get(COMPARED_IN, ()) if each != application]
    return replace(artifact, about={**artifact.about, COMPARED_IN: [*others, application][-MOST_APPLICATIONS:]})


def _allowed(call: RegionCall, compiled: CompiledRegion, verify: bool) -> bool:
    """Check the guards; compare results if they are UNPROVEN and not confirmed yet, or if `verify` is set."""
    kind, sizes = call.site.kind, call.sizes
    verdict, failed = compiled.guards.check(sizes)
    if verdict is Verdict.BROKEN:
        logger.info("Resolute: %s compiles again at %s, because its code needs %s", kind, sizes, failed)
        return False
    if not verify and (verdict is Verdict.HOLDS or compiled.guards.covered_sizes(sizes) in compiled.confirmed):
        return True
    call.stats.counters.verifications += 1
    difference = difference_from_original(compiled, call.site, call.weights, call.tensors, call.progress.cancellations)
    if difference is not None:
        logger.info("Resolute: the code of %s is wrong at %s (%s)", kind, sizes, difference)
        return False
    if verdict is not Verdict.HOLDS:
        compiled.confirmed.add(compiled.guards.covered_sizes(sizes))
    return True


def _refuse(region: Region, shapes: Shapes, detail: str) -> BypassReason:
    logger.warning("Resolute: %s; it runs eagerly", detail)
    reason = BypassReason(BypassCode.COMPILE_FAILED, detail)
    region.remember(shapes, reason)
    return reason


def why_failed(call: RegionCall, error: Exception) -> BypassReason:
    """Convert an error to the reason why a site runs its original until the next call of the module. Re-raises a
    cancellation. An error of the original itself will be raised again by that run.
    """
    kind = call.site.kind
    if isinstance(error, call.progress.cancellations):
        raise error
    if is_out_of_memory(error):
        detail = f"there is no memory to load {kind} and compare it with its original; it runs eagerly until then"
        return BypassReason(BypassCode.OUT_OF_MEMORY, detail)
    if isinstance(error, NotComparedError):
        return BypassReason(BypassCode.OBSERVED_INPUT, f"{error}; it runs eagerly until then")
    logger.debug("Resolute: %s runs eagerly", kind, exc_info=error)
    return BypassReason(BypassCode.COMPILE_FAILED, f"{kind}: {type(error).__name__}: {first_line(error)}")
