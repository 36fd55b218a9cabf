"""The miss path: how a call deals with a region that has no code for its sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ....errors import BypassCode, BypassReason, CaptureError, NotComparedError
from ....regions.site import Progress, RegionSite, SilentProgress
from ....stats import Stats
from ....store.artifact_store import ArtifactStore
from ..compile.compiled_region import CompiledRegion
from ..compile.tracing import Shapes, static_sizes
from .region import DeferredCompiler, Region, RegionCall
from .table import RegionTable, why_failed

# Regions whose new code one call compares, while it waits for nothing; and where it runs them all from then on.
MOST_COMPARED, MOST_AT_ONCE = 4, 10


class Missing(Enum):
    """How a call deals with a region without code."""

    LEAVE = "leave"  # leave it to be compiled, and run the original; compare a few of those whose code came
    LEAVE_ALL = "leave all"  # the same, and compare all; the call is made again when all is compiled
    COMPILE = "compile"  # wait until it is compiled
    REPEAT = "repeat"  # run what the call before ran: this one is recorded


@dataclass(frozen=True, eq=False)
class Lack:
    """A region that ran its original at some shapes, in place of code that will come. static: see `static_sizes`."""

    region: Region
    shapes: Shapes
    static: Shapes

    @property
    def is_settled(self) -> bool:
        """A call at these shapes needs no comparison any more."""
        return self.shapes in self.region.by_shapes or self.static in self.region.failures

    @property
    def has_come(self) -> bool:
        """There is code, to be compared at these shapes."""
        return any(compiled.static == self.static for compiled in list(self.region.compiled))


Lacks = dict[tuple[str, Shapes], Lack]
# (site, inputs) -> its region or why it has none, and its weights
RegionOf = Callable[[RegionSite, Sequence[torch.Tensor]], tuple[Region | BypassReason, Sequence[torch.Tensor]]]


class MissPath:
    """Of one module. kept: what the current call runs originals of, though code may have come. lacks: what it ran
    originals of.
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
        self._missing = Missing.LEAVE
        self.kept: Lacks = {}
        self.lacks: Lacks = {}
        self._at_sites: dict[tuple[RegionSite, Shapes], tuple[tuple[str, Shapes], Lack]] = {}  # of earlier calls too
        self._to_compare = 0  # so many regions more in the current call
        # Of one call of the module. To find the store, all settings of the environment are read: milliseconds.
        self._stores: dict[torch.device, ArtifactStore | None] = {}
        self._failed: dict[tuple[str, Shapes], BypassReason] = {}

    def begin(self, progress: Progress, missing: Missing, kept: Lacks, most: int) -> None:
        """A call of the module starts. most: regions that it compares, if it waits for nothing."""
        self._progress, self._missing, self.kept, self.lacks = progress, missing, kept, {}
        self._to_compare = most if missing is Missing.LEAVE else sys.maxsize
        self._stores.clear()
        self._failed.clear()

    def repeat(self) -> None:
        """The call is made again, to record it: it compares, loads and compiles nothing."""
        self._missing = Missing.REPEAT

    def forget_sites(self) -> None:
        """The module changed."""
        self._at_sites.clear()

    def waits(self, site: RegionSite, shapes: Shapes) -> bool:
        """The site's original runs without a look at its weights: its code is still being made, as in a call before."""
        key, lack = self._at_sites.get((site, shapes), (None, None))
        if key is None or lack is None or not self._leaves(lack.region):
            return False
        self.lacks[key] = lack
        return True

    def _leaves(self, region: Region) -> bool:
        """The call runs the original: the region's code is being made, or the call has compared enough."""
        if self._missing not in (Missing.LEAVE, Missing.LEAVE_ALL):
            return False
        return self._queue.awaits(region) or (bool(region.unverified) and self._to_compare <= 0)

    def resolve(
        self,
        region: Region,
        site: RegionSite,
        weights: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        shapes: Shapes,
    ) -> CompiledRegion | BypassReason | None:
        """Code for sizes that were not met before, or why there is none; None if the original runs until it comes."""
        key = region.key, shapes
        if (failed := self._failed.get(key)) is not None:
            return failed
        if self._missing is Missing.REPEAT:
            return self._repeated(region, key)
        if self.kept and key not in self.kept and (known := region.by_shapes.get(shapes)) is not None:
            return known
        leaves = self._missing is not Missing.COMPILE
        lack = Lack(region, shapes, static_sizes(site.dims, shapes))
        if self._leaves(region):
            return self._lacking(key, lack, site, inputs)
        call = self._call(region, site, weights, inputs)
        try:
            found = self._found(call) if leaves else self._compiled(call)
        except Exception as error:  # noqa: BLE001 (`why_failed` raises what has to be raised)
            found = why_failed(call, error)
            if isinstance(error, NotComparedError):  # a capture of this call goes when the next run begins
                self.lacks[key] = lack
        if isinstance(found, BypassReason) and shapes not in region.by_shapes:
            self._failed[key] = found
        return self._lacking(key, lack, site, inputs) if found is None or key in self.kept else found

    def _lacking(
        self, key: tuple[str, Shapes], lack: Lack, site: RegionSite, inputs: Sequence[torch.Tensor]
    ) -> CompiledRegion | BypassReason | None:
        """The call runs the original. What else the block runs is left too."""
        self.lacks[key] = lack
        self._at_sites[site, lack.shapes] = key, lack
        self._foresee(site, inputs[0])
        return None

    def _found(self, call: RegionCall) -> CompiledRegion | BypassReason | None:
        """Look up code for the call. What it lacks is left to the queue."""
        compared = self._stats.counters.verifications
        found = self._table.resolve(call)
        self._to_compare -= self._stats.counters.verifications - compared
        self._queue.note(call, found)
        return found

    def _compiled(self, call: RegionCall) -> CompiledRegion | BypassReason:
        """The same, once it is compiled: by other strategies while a comparison finds the code to be wrong."""
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
        """Return what the call before ran. Raises CaptureError where it did not come to the region."""
        if key in self.lacks:
            return None
        found = region.by_shapes.get(key[1])
        if found is None:
            raise CaptureError(f"the forward cannot be captured: a second run of it came to another {region.label}")
        return found

    def _foresee(self, site: RegionSite, x: torch.Tensor) -> None:
        """Leave to the queue what else the block runs: see `RegionSite.others`."""
        if site.others is None or self._missing is not Missing.LEAVE:
            return
        for other, inputs in site.others(x):
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
