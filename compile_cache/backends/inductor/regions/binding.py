"""The regions of one module: which group each site belongs to, where its weights are, and the call itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....config import CacheConfig
from ....errors import BypassCode, BypassReason
from ....regions.foreign_code import ForeignCode
from ....regions.region import Progress, RegionSite, SilentProgress
from ....regions.structure import Memo, parts, structure_digest
from ....stats import Stats
from ....store.artifact_store import ArtifactStore
from ..compile.tracing import WeightSlot, region_format, weight_slots
from ..compile.variant import Shapes, Variant
from ..parallel.parallel_compile import Seen, build, like
from ..parallel.pool import WorkerPool
from ..parallel.scheduling import LOOKED
from .table import RegionGroup, RegionTable, Request, group_key

_NOT_READY = "not ready"
_STREAMED = BypassReason(
    BypassCode.STREAMED_WEIGHTS,
    "weights are not all on the device (low VRAM); blocks with such weights run as they are",
)


@dataclass(eq=False)
class BoundSite:
    structure: str
    slots: list[WeightSlot]
    casting: list[torch.nn.Module]  # modules of ComfyUI that may cast or patch their weights on the way
    groups: dict[tuple[Any, ...], RegionGroup] = field(default_factory=dict)
    refused: BypassReason | None = None
    states: dict[torch.dtype, str] = field(default_factory=dict)  # how its weights come to a computation in a dtype


class BoundRegions:
    """Runs sites through the table. `announce(kind)` is called before each compile and may raise to cancel it."""

    def __init__(
        self,
        table: RegionTable,
        workers: WorkerPool,
        store_for: Callable[[torch.device], ArtifactStore | None],
        stats: Stats,
        config: CacheConfig,
        announce: Callable[[str], None],
    ) -> None:
        self._table = table
        self._workers = workers
        self._store_for = store_for
        self._stats = stats
        self._verify = config.verify
        self._announce = announce
        self._sites: dict[RegionSite, BoundSite] = {}
        self._distinct: set[tuple[str, str]] = set()
        self._groups: dict[int, RegionGroup] = {}
        self._progress: Progress = SilentProgress()
        self._seen: dict[str, Seen] | None = None  # while a call only looks: the regions that it came to
        # Of one call. What is told of the environment that a store is for takes milliseconds.
        self._stores: dict[torch.device, ArtifactStore | None] = {}
        self._no_room: dict[tuple[str, Shapes], BypassReason] = {}

    def begin(self, progress: Progress) -> None:
        """A call starts."""
        self._progress = progress
        self._stores.clear()
        self._no_room.clear()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Meanwhile every region runs its original, and is noted."""
        self._seen = {}
        try:
            yield
        except BaseException:
            self._seen = None
            raise

    def build_ahead(self, announce: Callable[[int, int, str], None]) -> None:
        """Compile what was seen, with workers that were called up. Raises what cancels."""
        seen, self._seen = [each for each in (self._seen or {}).values() if not each.group.variants], None
        if seen:
            store = self._store(seen[0].tensors[0].device)
            build(seen, self._table, self._workers, store, self._stats, self._progress, announce)

    def survey(self, sites: Iterable[RegionSite]) -> None:
        """Find the distinct groups before anything is compiled: they are the N of "7 of N".

        Done again when anything about the module changed (its weights epoch): structures and weights are read anew.
        """
        self._sites.clear()
        self._distinct.clear()
        self._groups.clear()
        memo: Memo = {}
        look = ForeignCode()
        for site in sites:
            own = [part for _, part in parts(site.module, site.without)]
            foreign = any(look.inside(module) for module in own)
            casting = [module for module in own if hasattr(module, "comfy_cast_weights")]
            structure = structure_digest(site.module, memo, site.without)
            bound = BoundSite(structure, weight_slots(site.module, site.without), casting)
            if foreign:  # its code is a closure that no key can describe
                bound.refused = BypassReason(
                    BypassCode.REPLACED_FORWARD,
                    f"another pack replaced code inside {site.kind}; such blocks run as they are",
                )
            self._sites[site] = bound
            self._distinct.add((site.kind, bound.structure))

    @property
    def compiled_count(self) -> tuple[int, int]:
        """(compiled, distinct) groups of this module. From any thread, while calls meet new ones."""
        done = sum(bool(group.variants) for group in list(self._groups.values()))
        return done, max(len(self._distinct), done)

    @property
    def keys(self) -> frozenset[str]:
        """Of the groups that were run."""
        return frozenset(group.key for group in list(self._groups.values()))

    def run(self, site: RegionSite, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the region, or the BypassReason for which the original must run."""
        bound = self._sites[site]
        weights = [slots[name] for slots, name in bound.slots]
        if bound.refused is not None:
            return bound.refused
        dtype = tensors[0].dtype
        state = bound.states.get(dtype)
        if state is None:
            state = bound.states[dtype] = _weights_state(bound, weights, dtype, tensors[0].device)
        if state == _NOT_READY:
            return _STREAMED
        tensors = [tensor.contiguous(memory_format=region_format(tensor)) for tensor in tensors]
        group = self._group(site, bound, tensors, state)
        if self._seen is not None:
            self._seen.setdefault(group.key, Seen(group, site, weights, [like(tensor) for tensor in tensors]))
            return LOOKED
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        variant = group.known(shapes)
        if variant is None:
            variant = self._no_room.get((group.key, shapes)) or self._resolve(group, site, weights, tensors)
        if isinstance(variant, BypassReason):
            return variant
        try:
            result = variant(weights, tensors)
        except (AssertionError, RuntimeError) as error:
            capturing = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
            if capturing or isinstance(error, (torch.cuda.OutOfMemoryError, *self._progress.cancellations)):
                raise
            return self._table.refuse(group, shapes, error)
        self._stats.counters.region_calls += 1
        return result

    def _resolve(
        self, group: RegionGroup, site: RegionSite, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Variant | BypassReason:
        """Load, compile, or compare. Where that takes more memory than there is, the original runs, in this call."""
        announce = functools.partial(self._announce, site.kind)
        store = self._store(tensors[0].device)
        request = Request(site, weights, tensors, self._stats, self._progress, announce, self._verify, store)
        try:
            return self._table.resolve(group, request)
        except torch.cuda.OutOfMemoryError:
            if self._workers.running:  # which hold some of it: the program ends them, and begins again
                raise
        detail = f"there is no memory to load {site.kind} and compare it with its original; it runs as it is until then"
        reason = BypassReason(BypassCode.OUT_OF_MEMORY, detail)
        self._no_room[group.key, request.shapes] = reason
        return reason

    def _store(self, device: torch.device) -> ArtifactStore | None:
        if device not in self._stores:
            self._stores[device] = self._store_for(device)
        return self._stores[device]

    def _group(self, site: RegionSite, bound: BoundSite, tensors: Sequence[torch.Tensor], state: str) -> RegionGroup:
        key = (state, *((tensor.dtype, tensor.ndim) for tensor in tensors))
        group = bound.groups.get(key)
        if group is None:
            group = self._table.group(group_key(site, bound.structure, tensors, state), site.kind)
            bound.groups[key] = group
            self._groups[id(group)] = group
        return group


def _weights_state(bound: BoundSite, weights: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> str:
    """How the block's weights come to a computation in `dtype`, `_NOT_READY` where they are not on the device.

    ComfyUI casts or patches weights on the way in (`comfy_cast_weights`, `weight_function`). A cast to another dtype
    is traced as part of the region; one to the same dtype does nothing, and ComfyUI leaves its flag behind on modules
    that were streamed once. A patch is Python that changes under our feet.
    """
    casts = ""
    for module in bound.casting:
        if "_v" in module.__dict__ or any(getattr(module, name, None) for name in ("weight_function", "bias_function")):
            return _NOT_READY
        others = any(weight is not None and weight.dtype != dtype for weight in module._parameters.values())
        casts += "c" if module.comfy_cast_weights and others else "-"
    for weight in weights:
        if weight.device != device or type(weight) not in (torch.nn.Parameter, torch.Tensor):
            return _NOT_READY
    return casts if "c" in casts else "plain"
