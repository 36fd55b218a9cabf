"""The regions of one module: binds each site to its weights and its shared region, and runs each call of a site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....attention.chooser import eager_attention
from ....code_identity.attributes import marks_in
from ....code_identity.reach import CodeReach, ReachCache
from ....config import CacheConfig
from ....errors import BypassCode, BypassReason, DonatedInputsError, StillMissingError
from ....keys import Component, digest
from ....modules.gguf_loras import LoraInputs
from ....modules.region_weights import cast_pattern, weight_forms, weight_inputs, weight_slots
from ....modules.site import Hook, Input, Lend, Progress, RegionSite, SilentProgress, take_donated
from ....modules.slots import Slot
from ....modules.structure import Memo, parts, structure_digest, unknown_setting
from ....store.artifact_store import ArtifactStore
from ....telemetry.stats import Stats
from ....torch_compat.flags import autocast_state
from ....torch_compat.out_of_memory import is_out_of_memory
from ..lower.compiled_region import CompiledRegion
from ..lower.tracing import in_region_format
from .miss_path import MOST_COMPARED, MissingCodes, MissPath, MissPolicy
from .region import DeferredCompiler, Region, region_key
from .table import RegionTable

# Traces run without autocast, so compiled code does not cast as autocast does.
_AUTOCAST = BypassReason(BypassCode.OBSERVED_INPUT, "another pack turned autocast on; blocks run eagerly inside it")

_WRITES_TO_COPY = BypassReason(
    BypassCode.OBSERVED_INPUT, "a block writes into an input that is not contiguous; such a block runs eagerly"
)


@dataclass(eq=False)
class _BoundSite:
    structure: str
    slots: list[Slot]
    casting: list[torch.nn.Module]  # modules that may cast or patch their weights before each use
    refused: BypassReason | None
    loras: LoraInputs
    regions: dict[tuple[Any, ...], Region] = field(default_factory=dict)
    cast_patterns: dict[tuple[Any, ...], str | BypassReason] = field(default_factory=dict)  # by dtypes and devices


def _replaced(kind: str, foreign: bool, reach: CodeReach) -> BypassReason | None:
    """Why a site runs its original if another pack replaced code in it (no key can describe a closure), or None."""
    if not foreign and not reach.foreign:
        return None
    what = str(reach.foreign[0]) if reach.foreign else f"code inside {kind}"
    return BypassReason(BypassCode.REPLACED_FORWARD, f"another pack replaced {what}; {kind} blocks run eagerly")


class RegionBinding:
    """Runs the sites of one module through the shared table of regions.

    store_for: returns the store of compiled regions for a device, or None.
    bypass: called with the reason each time an original runs instead of compiled code.
    """

    def __init__(
        self,
        table: RegionTable,
        store_for: Callable[[torch.device], ArtifactStore | None],
        bypass: Callable[[BypassReason], None],
        stats: Stats,
        config: CacheConfig,
        queue: DeferredCompiler,
    ) -> None:
        self._table = table
        self._bypass = bypass
        self._stats = stats
        self._policy = config.attribute_policy
        self._reaches = ReachCache(config.management_modules)
        self._torch_flags: tuple[Component, ...] = ()
        self._sites: dict[RegionSite, _BoundSite] = {}
        self._memo = Memo()
        self._reach_of: dict[frozenset[type], CodeReach] = {}  # valid for one survey, in which no code is replaced
        self._distinct: set[tuple[str, str]] = set()
        self._expected = 0  # estimated regions of hooks that create their sites during a call
        self._regions: dict[int, Region] = {}
        self._progress: Progress = SilentProgress()
        self.was_reached = False  # the current call reached a region, with or without compiled code
        self.misses = MissPath(table, queue, store_for, self._foreseen, self.announce, stats, config.verify)

    def survey(self, hooks: Iterable[Hook]) -> None:
        """Read the structure of each known site and locate its weights. Compiles nothing. Sites created during a call
        are read at first use; until then, each distinct structure of their hooks counts as one region.

        Call it again when the module changed (when its weights epoch changed).
        """
        for known in (self._sites, self._distinct, self._regions):
            known.clear()
        self.misses.forget_sites()
        self._memo, self._reach_of = Memo(), {}
        hooks = list(hooks)
        self._expected = len({(hook.label[0], hook.structure) for hook in hooks if hook.label is not None})
        for hook in hooks:
            for site in hook.sites:
                self._bind(site)

    def _bind(self, site: RegionSite, is_hooked: bool = False) -> _BoundSite:
        """Read a site's structure, weights and code. is_hooked: our own hook replaces the module's forward now."""
        own = [part for _, part in parts(site.module, site.without)]
        reach = self._reach(frozenset(map(type, own)))
        casting = [module for module in own if self._policy.may_cast(module)]
        structure = site.structure or structure_digest(site.module, self._memo, site.without, policy=self._policy)
        foreign = any(marks_in(module, is_hooked and module is site.module) for module in own)
        refused = _replaced(site.kind, foreign, reach)
        if unknown := refused is None and (reach.unknown or unknown_setting(own, self._policy)):
            text = f"{site.kind}: {unknown}; such blocks run eagerly"
            refused = BypassReason(BypassCode.OBSERVED_INPUT, text)
        slots = weight_slots(site.module, site.without)
        loras = LoraInputs(site, slots)
        bound = self._sites[site] = _BoundSite(digest((structure, reach.digest)), slots, casting, refused, loras)
        self._distinct.add((site.kind, bound.structure))
        return bound

    def _reach(self, kinds: frozenset[type]) -> CodeReach:
        if kinds not in self._reach_of:
            self._reach_of[kinds] = self._reaches.of(kinds)
        return self._reach_of[kinds]

    def begin(
        self,
        progress: Progress,
        torch_flags: tuple[Component, ...],
        miss_policy: MissPolicy,
        kept: MissingCodes | None = None,
        most: int = MOST_COMPARED,
        may_capture: bool = True,
    ) -> None:
        """A call of the module begins. torch_flags: torch's flags during it. Other arguments: see `MissPath.begin`."""
        self._progress, self._torch_flags = progress, torch_flags
        self.misses.begin(progress, miss_policy, kept or {}, most, may_capture)
        self.was_reached = False

    @property
    def compiled_count(self) -> tuple[int, int]:
        """(compiled, distinct) regions of this module. Any thread may read it while a call adds regions."""
        done = self._ready()
        return done, max(len(self._distinct), done, self._expected)

    def _ready(self) -> int:
        """The number of regions with code, including regions that no call reached yet but another model compiled."""
        reached = list(self._regions.values())
        known, dtypes = {region.form[0] for region in reached}, {region.form[1] for region in reached}
        others = self._table.ready_forms if reached else frozenset()
        waiting = [structure for _, structure in list(self._distinct) if structure not in known]
        shared = [each for each in waiting if any((each, dtype) in others for dtype in dtypes)]
        return len(shared) + sum(region.is_ready for region in reached)

    @property
    def quantized(self) -> frozenset[tuple[str, str]]:
        """The quantized weights of the regions that calls reached, see `Trace.quantized`."""
        regions = list(self._regions.values())
        return frozenset(each for region in regions for code in list(region.compiled) for each in code.quantized)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the regions that calls reached."""
        return frozenset(region.key for region in list(self._regions.values()))

    def run(self, site: RegionSite, *given: Input, lend: Lend | None = None) -> Any:
        """Compute `site.function(site.module, *tensors)`, with compiled code if available. lend: see `LendingRunner`.

        Raises the original's errors, cancellations, StillMissingError (see `RegionSite.begins_block`), and
        DonatedInputsError if code failed after consuming its inputs.
        """
        self._progress.begin_block()
        self.was_reached = True
        donated = [number for number, each in enumerate(given) if isinstance(each, list)]
        tensors = take_donated(given)
        if lend is None:
            return self._run(site, tensors, donated, site.begins_block)
        if refused := self._bound(site).refused:
            return self._run_original(site, tensors, refused)
        if self.misses.still_missing(site, tuple(tuple(tensor.shape) for tensor in tensors)):
            return self._run_original(site, tensors, None)
        with lend():
            return self._run(site, tensors, donated)

    def _run(
        self, site: RegionSite, tensors: list[torch.Tensor], donated: Sequence[int], may_run_whole: bool = False
    ) -> Any:
        bound = self._bound(site)
        weights = weight_inputs(bound.slots)
        site, tensors, refused = bound.loras.added_to(tensors)
        region = refused or self._region(site, bound, weights, tensors)
        if isinstance(region, BypassReason):
            return self._run_original(site, tensors, region)
        inputs = [in_region_format(tensor, dims) for tensor, dims in zip(tensors, site.dims, strict=True)]
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        found = None if self.misses.kept else region.by_shapes.get(shapes)
        if found is None and may_run_whole and self.misses.runs_whole(region, site, shapes):
            raise StillMissingError
        if found is None:
            found = self.misses.resolve(region, site, weights, inputs, shapes)
        if isinstance(found, CompiledRegion) and any(inputs[index] is not tensors[index] for index in found.written):
            found = _WRITES_TO_COPY
        if not isinstance(found, CompiledRegion):
            return self._run_original(site, tensors, found)
        device = inputs[0].device
        if donated:  # drop the caller's references, so that the region frees these inputs after their last use
            tensors = inputs
        try:
            result = found(weights, inputs, donated)
        except Exception as error:
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if capturing or is_out_of_memory(error) or isinstance(error, self._progress.cancellations):
                raise
            refused = self._table.refuse(region, shapes, error)
            if donated:
                raise DonatedInputsError(refused.detail) from error
            return self._run_original(site, tensors, refused)
        self._stats.counters.region_calls += 1
        return result

    def _bound(self, site: RegionSite) -> _BoundSite:
        """The binding of a site during a call; binds a new site."""
        return self._sites.get(site) or self._bind(site, is_hooked=True)

    def _run_original(self, site: RegionSite, tensors: Sequence[torch.Tensor], reason: BypassReason | None) -> Any:
        """Run the original, and report a bypass. reason: None if the region's code is still being compiled."""
        with eager_attention():
            result = site.function(site.module, *tensors)
        if reason is not None:  # after the call: an original that raises fails the prompt as without Resolute
            self._bypass(reason)
        return result

    def _region(
        self, site: RegionSite, bound: _BoundSite, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Region | BypassReason:
        """The region of a site for inputs of these dtypes, or the reason why the original must run."""
        if bound.refused is not None:
            return bound.refused
        dtype, device = tensors[0].dtype, tensors[0].device
        if autocast_state(device.type) != "off":
            return _AUTOCAST
        form = (dtype, weight_forms(bound.slots), *[(weight.dtype, weight.device) for weight in weights])
        if form not in bound.cast_patterns:
            bound.cast_patterns[form] = cast_pattern(bound.casting, bound.slots, dtype, device, self._policy)
        pattern = bound.cast_patterns[form]
        if isinstance(pattern, BypassReason):
            return pattern
        form = (pattern, self._torch_flags, *((tensor.dtype, tensor.ndim) for tensor in tensors))
        region = bound.regions.get(form)
        if region is None:
            key = region_key(site, bound.structure, tensors, pattern, self._torch_flags)
            region = bound.regions[form] = self._table.region(key, site.kind, (bound.structure, str(dtype)))
            self._regions[id(region)] = region
        return region

    def _foreseen(
        self, site: RegionSite, inputs: Sequence[torch.Tensor]
    ) -> tuple[Region | BypassReason, Sequence[torch.Tensor]]:
        """The region and the weights of a site that no call has reached yet, for placeholder `inputs`."""
        bound = self._bound(site)
        weights = weight_inputs(bound.slots)
        return self._region(site, bound, weights, inputs), weights

    def announce(self) -> None:
        """Show the number of compiled regions of the module."""
        self._progress.report(*self.compiled_count)
