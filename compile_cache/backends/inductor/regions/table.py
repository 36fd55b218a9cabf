"""All regions of the process: one compiled artifact per distinct group, shared by every model that has such blocks."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....errors import BypassCode, BypassReason, RegionCompileError
from ....keys import digest
from ....regions.region import Progress, RegionSite
from ....stats import Stats
from ....store.artifact_store import Artifact, ArtifactStore, InvalidArtifactError
from ..compile.artifacts import pack, unpack
from ..compile.lowering import assumptions_of, compile_trace
from ..compile.shape_guards import Verdict
from ..compile.tracing import Trace, bind_dims, trace
from ..compile.variant import Shapes, Variant
from .numerics_check import disagreement, original

logger = logging.getLogger(__name__)

# On the CPU the meta kernel of a convolution asks whether the batch is 1 and whether it is under 16; a hint above
# both leaves the symbol unbounded from above.
_CPU_BATCH_HINT = 17

# More artifacts than this for one group mean that something defeats the dynamic dimensions.
_MOST_VARIANTS = 8


@dataclass(eq=False)
class RegionGroup:
    """Sites of one kind, structure, dtypes and device."""

    key: str
    label: str
    variants: list[Variant] = field(default_factory=list)
    by_shapes: dict[Shapes, Variant] = field(default_factory=dict)
    failures: dict[Shapes, BypassReason] = field(default_factory=dict)  # by static sizes: no size of these compiles
    refused: dict[Shapes, BypassReason] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)  # names of artifacts that came from the store, or went there
    untried: dict[Variant, Callable[[], None]] = field(default_factory=dict)  # not compared yet, and what keeps each

    def add(self, variant: Variant, keep: Callable[[], None]) -> None:
        """A new artifact: `may_run` compares it before its first use, and calls `keep` where it is right."""
        self.variants.append(variant)
        self.untried[variant] = keep

    def known(self, shapes: Shapes) -> Variant | BypassReason | None:
        """What was decided for these sizes: asked in every call."""
        return self.by_shapes.get(shapes) or self.refused.get(shapes)


def group_key(site: RegionSite, structure: str, tensors: Sequence[torch.Tensor], weights_state: str) -> str:
    """What sites must have in common to share an artifact."""
    # The device with its index: generated code launches on the device that it was made for.
    inputs = tuple((str(tensor.dtype), str(tensor.device), tensor.ndim) for tensor in tensors)
    return digest((site.kind, site.dims, structure, inputs, weights_state))


@dataclass(frozen=True, eq=False)
class Request:
    """One call of a region that has no artifact for its sizes yet."""

    site: RegionSite
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    stats: Stats
    progress: Progress
    announce: Callable[[], None]  # called before a compile; may cancel it by raising
    verify: bool = False
    store: ArtifactStore | None = None

    @property
    def shapes(self) -> Shapes:
        return tuple(tuple(tensor.shape) for tensor in self.tensors)


class RegionTable:
    """Thread-safe: whoever adds to a group, or loads code, holds `lock`."""

    def __init__(self) -> None:
        self._groups: dict[str, RegionGroup] = {}
        self.lock = threading.RLock()

    def group(self, key: str, label: str) -> RegionGroup:
        with self.lock:
            group = self._groups.setdefault(key, RegionGroup(key, label))
            group.label = label  # where it was loaded ahead, nobody knew
            return group

    @property
    def compiled(self) -> frozenset[str]:
        """Keys of the groups that have an artifact in memory."""
        return frozenset(key for key, group in list(self._groups.items()) if group.variants)

    def preload(self, key: str, store: ArtifactStore) -> int:
        """Load what the store has for a group, if nobody asked for it yet. Returns how many artifacts it loaded."""
        with self.lock:
            group = self._groups.setdefault(key, RegionGroup(key, ""))
            return 0 if group.variants else _load(store, group)

    def resolve(self, group: RegionGroup, request: Request) -> Variant | BypassReason:
        """The artifact for the request's sizes, or why there is none. Compiles once for each set of assumptions."""
        shapes = request.shapes
        with self.lock:
            known = group.known(shapes)
            if known is not None:
                return known
            sizes = bind_dims(request.site.dims, shapes)
            if sizes is None:
                return self._refuse(group, shapes, f"{group.label}: inputs {shapes} do not fit {request.site.dims}")
            variant = _find(group, request, sizes)
            if variant is None and request.store is not None and take_from(request.store, group, request.stats):
                variant = _find(group, request, sizes)
            if variant is None:
                return self._build(group, request, sizes)
            group.by_shapes[shapes] = variant
            return variant

    def _build(self, group: RegionGroup, request: Request, sizes: dict[str, int]) -> Variant | BypassReason:
        """Compile; where another process does so at the same time, wait for what it makes."""
        static = static_sizes(request.site, request.shapes)
        if static in group.failures:
            return group.refused.setdefault(request.shapes, group.failures[static])
        if len(group.variants) >= _MOST_VARIANTS:
            return self._refuse(group, request.shapes, f"{group.label} was compiled {_MOST_VARIANTS} times already")
        request.announce()
        try:
            with _alone(request.store, group.key, request.progress):
                variant = None
                if request.store is not None and take_from(request.store, group, request.stats):
                    variant = _find(group, request, sizes)
                if variant is None:
                    variant = _compile_for(group, request, sizes)
        except RegionCompileError as error:
            # Inputs that the original refuses too (a text for another model) are not our failure.
            original(request.site, request.tensors)
            request.stats.counters.compile_failures += 1
            logger.warning("Resolute: %s; it runs as it is", error, exc_info=logger.isEnabledFor(logging.DEBUG))
            group.failures[static] = BypassReason(BypassCode.COMPILE_FAILED, str(error))
            return group.refused.setdefault(request.shapes, group.failures[static])
        group.by_shapes[request.shapes] = variant
        return variant

    def refuse(self, group: RegionGroup, shapes: Shapes, error: BaseException) -> BypassReason:
        """Latch a failure at run time: these sizes run the original from now on."""
        with self.lock:
            group.by_shapes.pop(shapes, None)
            return self._refuse(group, shapes, f"{group.label} failed at {shapes}: {error}")

    @staticmethod
    def _refuse(group: RegionGroup, shapes: Shapes, detail: str) -> BypassReason:
        logger.warning("Resolute: %s; it runs as it is", detail)
        return group.refused.setdefault(shapes, BypassReason(BypassCode.COMPILE_FAILED, detail))


def _find(group: RegionGroup, request: Request, sizes: dict[str, int]) -> Variant | None:
    """The first artifact in memory that may run at these sizes."""
    static = static_sizes(request.site, request.shapes)
    same = [variant for variant in group.variants if variant.static == static]
    return next((variant for variant in same if may_run(group, variant, request, sizes)), None)


def may_run(group: RegionGroup, variant: Variant, request: Request, sizes: dict[str, int]) -> bool:
    """Whether an artifact of the group may run at these sizes. A new one is kept or dropped by the answer.

    Raises OutOfMemoryError where there is no room to compare, and what cancels: then it stays for the next call.
    """
    keep = group.untried.get(variant)
    fits = _admits(variant, request, sizes, request.verify or keep is not None)
    if keep is not None:
        del group.untried[variant]
        if fits:
            keep()
        else:
            group.variants.remove(variant)
    return fits


def _alone(store: ArtifactStore | None, key: str, progress: Progress) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if store is None else store.build_lock(key, progress.raise_if_cancelled)


def take_from(store: ArtifactStore, group: RegionGroup, stats: Stats) -> bool:
    """Load what the store has for a group and memory has not, while somebody waits. Whether there was anything."""
    started = time.perf_counter()
    loaded = _load(store, group)
    if loaded:
        seconds = time.perf_counter() - started
        stats.counters.region_loads += loaded
        stats.counters.stall_seconds += seconds
        stats.event("load", group.label, seconds)
    return loaded > 0


def _load(store: ArtifactStore, group: RegionGroup) -> int:
    loaded = 0
    for artifact in store.load(group.key, frozenset(group.stored)):
        try:
            group.variants.append(unpack(artifact))
            loaded += 1
        except InvalidArtifactError as error:
            store.discard(artifact.name, str(error))
        group.stored.add(artifact.name)
    return loaded


def _keep(store: ArtifactStore | None, group: RegionGroup, variant: Variant) -> None:
    if store is None:
        return
    try:
        save(store, group, pack(group.key, group.label, variant))
    except InvalidArtifactError as error:
        logger.info("Resolute: %s is compiled again after a restart: %s", group.label, error)


def save(store: ArtifactStore, group: RegionGroup, artifact: Artifact) -> None:
    store.save(artifact)
    group.stored.add(artifact.name)


def _compile_for(group: RegionGroup, request: Request, sizes: dict[str, int]) -> Variant:
    """Compile for hints that keep the code general; only where that does not fit these sizes, for these alone."""
    general = general_hints(sizes, request.tensors[0].device)
    for hints in [general] if general == sizes else [general, sizes]:
        variant = _compile(request, hints)
        group.add(variant, functools.partial(_keep, request.store, group, variant))
        if may_run(group, variant, request, sizes):
            return variant
    raise RegionCompileError(request.site.kind, AssertionError("its results differ from the original's"))


def _admits(variant: Variant, request: Request, sizes: dict[str, int], verify: bool) -> bool:
    """Whether an artifact may run at `sizes`: by its assumptions, and by comparing results where they do not tell."""
    kind = request.site.kind
    verdict, decided = variant.assumptions.check(sizes)
    if verdict is Verdict.BROKEN:
        logger.info("Resolute: %s compiles again at %s, for it was compiled for %s", kind, sizes, decided)
        return False
    if not verify and (verdict is Verdict.HOLDS or decided in variant.shown):
        return True
    request.stats.counters.verifications += 1
    error = disagreement(variant, request.site, request.weights, request.tensors, request.progress.cancellations)
    if error is not None:
        logger.info("Resolute: %s does not carry over to %s (%s)", kind, sizes, error)
        return False
    variant.shown.add(decided)
    return True


def static_sizes(site: RegionSite, shapes: Shapes) -> Shapes:
    """The sizes of the dimensions without a name, 0 elsewhere."""
    return tuple(
        tuple(size if name is None else 0 for name, size in zip(names, shape, strict=True))
        for names, shape in zip(site.dims, shapes, strict=True)
    )


def general_hints(sizes: dict[str, int], device: torch.device) -> dict[str, int]:
    """Never 1: an example of size 1 invites a special case. See _CPU_BATCH_HINT for the other bound."""
    lowest = {"b": _CPU_BATCH_HINT} if device.type == "cpu" else {}
    return {name: max(size, lowest.get(name, 2)) for name, size in sizes.items()}


def inductor_options(device: torch.device) -> dict[str, Any]:
    """On CUDA, activations stay channels-last between regions: convolutions want it, and tokens are then a view.
    Pointwise kernels take inductor's first choice of blocks: trying others took seconds, and sped nothing up."""
    return {} if device.type == "cpu" else {"force_layout_optimization": True, "triton.autotune_pointwise": False}


def _compile(request: Request, hints: dict[str, int]) -> Variant:
    site, tensors = request.site, request.tensors
    started = time.perf_counter()
    options = inductor_options(tensors[0].device)
    failures: list[Exception] = []
    for oblivious in (True, False):
        try:
            traced: Trace = trace(site.function, site.module, tensors, site.dims, hints, oblivious, site.without)
            compiled = compile_trace(traced, options, keep=request.store is not None)
            break
        except Exception as error:
            if isinstance(error, (torch.cuda.OutOfMemoryError, *request.progress.cancellations)):
                raise
            failures.append(error)
    else:
        raise RegionCompileError(site.kind, failures[0]) from failures[0]
    seconds = time.perf_counter() - started
    request.stats.counters.region_compiles += 1
    request.stats.counters.stall_seconds += seconds
    request.stats.event("compile", f"{site.kind} ({site.name})", seconds)
    static = static_sizes(site, request.shapes)
    return Variant(compiled, assumptions_of(traced, compiled), static, traced.used_weights, traced.output_spec)
