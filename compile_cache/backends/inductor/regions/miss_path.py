"""The miss path: how a call handles a region that has no code for its sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ....errors import BypassCode, BypassReason, CaptureError, NotComparedError
from ....modules.site import Progress, RegionSite, SilentProgress
from ....store.artifact_store import ArtifactStore
from ....telemetry.stats import Stats
from ..lower.compiled_region import CompiledRegion
from ..lower.tracing import Shapes, static_sizes
from .region import DeferredCompiler, Region, RegionCall
from .table import RegionTable, why_failed

# The most comparisons in a call that does not wait: 4 while regions lack code, 10 if these finish the job.
MOST_COMPARED, MOST_AT_ONCE = 4, 10


class MissPolicy(Enum):
    """How a call handles a region without code."""

    DEFER = "defer"  # queue it and run the original; compare only a few regions whose code is new
    DEFER_ALL = "defer all"  # the same, but compare all; the call is repeated once all are compiled
    COMPILE = "compile"  # wait until it is compiled
    REPEAT = "repeat"  # run exactly the code of the previous call, because this call is captured


@dataclass(frozen=True, eq=False)
class MissingCode:
    """A region that ran its original because its code is not ready at these shapes. static: see `static_sizes`."""

    region: Region
    shapes: Shapes
    static: Shapes

    @property
    def is_settled(self) -> bool:
        """True if a call at these shapes needs no further comparison: code is confirmed, or compiling failed."""
        return self.shapes in self.region.by_shapes or self.static in self.region.failures

    @property
    def has_code(self) -> bool:
        """True if there is code that may be right at these shapes."""
        return bool(self.region.usable(self.static, self.shapes))

    @property
    def is_unverified(self) -> bool:
        """True if there is such code that no call has compared."""
        return any(each in self.region.unverified for each in self.region.usable(self.static, self.shapes))


MissingCodes = dict[tuple[str, Shapes], MissingCode]
# (site, inputs) -> (the region or why there is none, the site's weights)
RegionOf = Callable[[RegionSite, Sequence[torch.Tensor]], tuple[Region | BypassReason, Sequence[torch.Tensor]]]


class MissPath:
    """The miss path of one module. kept: regions whose original the current call must run, even if they have code now.
    missing: regions whose original it ran.
    """

    def __init__(
        self,
        table: RegionTable,
        queue: DeferredCompiler,
        store_for: Callable[[torch.device], ArtifactStore | None],
        region_of: RegionOf,
        announce: Callable[[], None],
        stats: Stats,
        verify: bool,
    ) -> None:
        self._table, self._queue, self._store_for, self._region_of = table, queue, store_for, region_of
        self._announce, self._stats, self._verify = announce, stats, verify
        self._progress: Progress = SilentProgress()
        self._miss_policy = MissPolicy.DEFER
        self.kept: MissingCodes = {}
        self.missing: MissingCodes = {}
        # Also of earlier calls.
        self._at_sites: dict[tuple[RegionSite, Shapes], tuple[tuple[str, Shapes], MissingCode]] = {}
        # The number of regions that lacked code when a call last ran the shares of a block, by its first share.
        self._left_at: dict[tuple[str, Shapes], int] = {}
        self._may_capture = True
        self._to_compare = 0  # regions that the current call may still compare
        # Cached per call: looking up a store reads all settings of the environment, which takes milliseconds.
        self._stores: dict[torch.device, ArtifactStore | None] = {}
        self._failed: dict[tuple[str, Shapes], BypassReason] = {}

    def begin(
        self, progress: Progress, miss_policy: MissPolicy, kept: MissingCodes, most: int, may_capture: bool
    ) -> None:
        """A call of the module begins. most: the regions that it may compare under MissPolicy.DEFER. may_capture: a
        capture may repeat the call.
        """
        self._may_capture = may_capture
        self._progress, self._miss_policy, self.kept, self.missing = progress, miss_policy, kept, {}
        self._to_compare = most if miss_policy is MissPolicy.DEFER else sys.maxsize
        self._stores.clear()
        self._failed.clear()

    def repeat(self) -> None:
        """The same call runs again for a capture: compare, load and compile nothing."""
        self._miss_policy = MissPolicy.REPEAT

    def forget_sites(self) -> None:
        """Forget the sites of earlier calls, because the module changed."""
        self._at_sites.clear()
        self._left_at.clear()

    def still_missing(self, site: RegionSite, shapes: Shapes) -> bool:
        """True if the site's code was missing in an earlier call and still is: run the original without its weights."""
        key, missing_code = self._at_sites.get((site, shapes), (None, None))
        if key is None or missing_code is None or not self._defers(missing_code):
            return False
        self.missing[key] = missing_code
        return True

    def _defers(self, missing_code: MissingCode) -> bool:
        """True if the call runs the original: its code is being compiled, or the call has compared enough."""
        if self._miss_policy not in (MissPolicy.DEFER, MissPolicy.DEFER_ALL):
            return False
        region = missing_code.region
        is_awaited = self._queue.awaits(region) and not missing_code.has_code
        return is_awaited or (self._to_compare <= 0 and missing_code.is_unverified)

    def runs_whole(self, region: Region, site: RegionSite, shapes: Shapes) -> bool:
        """True if the whole block runs in place of this first share. Its code was missing in an earlier call that ran
        the shares, which queued them all, and nothing was compiled since.
        """
        if self._miss_policy is not MissPolicy.DEFER or self._may_capture:
            return False
        missing_code = MissingCode(region, shapes, static_sizes(site.dims, shapes))
        if missing_code.has_code or not self._queue.awaits(region):
            return False
        key, left = (region.key, shapes), self._queue.left
        if self._left_at.get(key) != left:
            self._left_at[key] = left
            return False
        self.missing[key] = missing_code
        return True

    def resolve(
        self,
        region: Region,
        site: RegionSite,
        weights: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        shapes: Shapes,
    ) -> CompiledRegion | BypassReason | None:
        """The code for new sizes, or why there is none; None if the original runs until the code is compiled."""
        key = region.key, shapes
        if (failed := self._failed.get(key)) is not None:
            return failed
        if self._miss_policy is MissPolicy.REPEAT:
            return self._repeated(region, key)
        if self.kept and key not in self.kept and (known := region.by_shapes.get(shapes)) is not None:
            return known
        defers = self._miss_policy is not MissPolicy.COMPILE
        missing_code = MissingCode(region, shapes, static_sizes(site.dims, shapes))
        if self._defers(missing_code):
            return self._record_missing(key, missing_code, site, inputs)
        call = self._call(region, site, weights, inputs)
        try:
            found = self._found(call) if defers else self._compiled(call)
        except Exception as error:  # noqa: BLE001 (`why_failed` re-raises cancellations)
            found = why_failed(call, error)
            if isinstance(error, NotComparedError):  # a capture of this call is dropped when the next run begins
                self.missing[key] = missing_code
        if isinstance(found, BypassReason) and shapes not in region.by_shapes:
            self._failed[key] = found
        return self._record_missing(key, missing_code, site, inputs) if found is None or key in self.kept else found

    def _record_missing(
        self, key: tuple[str, Shapes], missing_code: MissingCode, site: RegionSite, inputs: Sequence[torch.Tensor]
    ) -> CompiledRegion | BypassReason | None:
        """Record that the call runs the original, and queue the other regions of the block. Returns None."""
        self.missing[key] = missing_code
        self._at_sites[site, missing_code.shapes] = key, missing_code
        self._foresee(site, inputs[0])
        return None

    def _found(self, call: RegionCall) -> CompiledRegion | BypassReason | None:
        """Look up code for the call; queue the region if it has none."""
        compared = self._stats.counters.verifications
        found = self._table.resolve(call)
        self._to_compare -= self._stats.counters.verifications - compared
        self._queue.note(call, found)
        return found

    def _compiled(self, call: RegionCall) -> CompiledRegion | BypassReason:
        """Look up code, and wait for its compile. Repeats with other strategies while a comparison rejects the code."""
        waited = False
        while (found := self._found(call)) is None:
            if not waited:
                self._announce()
            waited = True
            self._queue.finish([call.region.key], self._progress)
            if self._queue.awaits(call.region):
                detail = f"there is no memory to compile {call.site.kind}; it runs eagerly until then"
                return BypassReason(BypassCode.OUT_OF_MEMORY, detail)
        if waited:
            self._announce()
        return found

    def _repeated(self, region: Region, key: tuple[str, Shapes]) -> CompiledRegion | BypassReason | None:
        """Return the code that the previous call ran. Raises CaptureError if that call did not reach the region."""
        if key in self.missing:
            return None
        found = region.by_shapes.get(key[1])
        if found is None:
            raise CaptureError(f"the forward cannot be captured: a second run of it came to another {region.label}")
        return found

    def _foresee(self, site: RegionSite, x: torch.Tensor) -> None:
        """Queue the other regions that the block runs, see `RegionSite.foreseen`."""
        if site.foreseen is None or self._miss_policy is not MissPolicy.DEFER:
            return
        for other, inputs in site.foreseen(x):
            region, weights = self._region_of(other, inputs)
            if isinstance(region, Region):
                self._queue.note(self._call(region, other, weights, inputs), None, is_foreseen=True)

    def _call(
        self, region: Region, site: RegionSite, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> RegionCall:
        device = inputs[0].device
        if device not in self._stores:
            self._stores[device] = self._store_for(device)
        about = (self._stats, self._progress, self._announce, self._verify, self._stores[device])
        return RegionCall(region, site, weights, inputs, *about)
