"""A region shared by sites of equal structure: its compiled code, and the check that the code may run for a call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ....errors import BypassCode, BypassReason, first_line
from ....keys import Component, digest
from ....modules.site import Progress, RegionSite
from ....store.artifact_store import Artifact, ArtifactStore, InvalidArtifactError
from ....telemetry.stats import Stats
from ....torch_compat.flags import without_attention
from ....torch_compat.out_of_memory import is_out_of_memory
from ..lower.artifacts import measured, unpack
from ..lower.compiled_region import CompiledRegion
from ..lower.private_cache import inductor_lock
from ..lower.tracing import Shapes, Trace, bind_dims, general_hints, static_sizes, trace

logger = logging.getLogger(__name__)

_MOST_SHAPES = 1024  # combinations of shapes that a region remembers
# In `Artifact.about`: the latest applications in which a call compared the code. A key has the code that a block
# reaches by its names. An application whose source differs may differ in more, so it compares the code again.
COMPARED_IN, MOST_APPLICATIONS = "compared_in", 8


def region_key(
    site: RegionSite,
    structure: str,
    tensors: Sequence[torch.Tensor],
    pattern: str,
    torch_flags: Sequence[Component] = (),
) -> str:
    """A digest of everything that two sites must have in common to share compiled code.

    structure: digest of the block and of the functions that it calls. pattern: the `cast_pattern` of its weights.
    torch_flags: torch's flags during the call, see `torch_flags`.
    """
    # Includes the device index: generated code launches on the device that it was compiled for.
    inputs = tuple((str(tensor.dtype), str(tensor.device), tensor.ndim) for tensor in tensors)
    flags = tuple(torch_flags) if site.attends else without_attention(torch_flags)
    return digest((site.kind, site.dims, structure, inputs, pattern, flags))


@dataclass(frozen=True, eq=False)
class _Unverified:
    """Code that no comparison has confirmed yet. artifact: makes the artifact to store after it. stored: name of the
    unverified artifact in the store, or empty. is_made: a worker compiled it.
    made_for: the shapes for which this process made it; None if it was loaded.
    was_compared: another application confirmed it, and may use it again.
    """

    artifact: Callable[[], Artifact]
    stored: str = ""
    is_made: bool = False
    was_compared: bool = False
    made_for: Shapes | None = None

    @property
    def is_loaded(self) -> bool:
        return self.made_for is None


@dataclass(eq=False)
class Region:
    """The compiled code that all sites with one `region_key` share, and the sizes that cannot be compiled.

    label: the kind of block, for people. form: the digest of its structure and its compute dtype; empty until a call
    reaches the region.
    compiled: one entry, unless a call had sizes that its guards exclude.
    by_shapes: for the latest shapes seen, the compiled code, or the reason why the original runs.
    failures: by static sizes, why compiling failed; it is not retried for any sizes with these static ones.
    stored: names of the artifacts that were loaded from the store or saved to it.
    unverified: compiled code that no comparison has confirmed yet.
    excluded: pairs of code and shapes, the latest ones: its guards fail there, and no comparison showed it to be right.
    dropped: the number of pieces of wrong code.
    """

    key: str
    label: str
    form: tuple[str, ...] = ()
    compiled: list[CompiledRegion] = field(default_factory=list)
    by_shapes: dict[Shapes, CompiledRegion | BypassReason] = field(default_factory=dict)
    failures: dict[Shapes, BypassReason] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    unverified: dict[CompiledRegion, _Unverified] = field(default_factory=dict)
    excluded: dict[tuple[CompiledRegion, Shapes], None] = field(default_factory=dict)
    dropped: int = 0

    def usable(self, static: Shapes, shapes: Shapes) -> list[CompiledRegion]:
        """The compiled code for these static sizes, without code that is excluded."""
        found = list(self.compiled)
        return [each for each in found if each.static == static and (each, shapes) not in self.excluded]

    @property
    def is_ready(self) -> bool:
        """True if it has code that was compared with the original, or that a worker made and the next call compares."""
        excluded = {compiled for compiled, _ in list(self.excluded)}
        found = [(compiled, self.unverified.get(compiled)) for compiled in list(self.compiled)]
        return any(
            each is None or each.is_loaded or (each.is_made and compiled not in excluded) for compiled, each in found
        )

    def remember(self, shapes: Shapes, found: CompiledRegion | BypassReason) -> None:
        """Record the code for these shapes, or why the original runs. Evicts the oldest entry beyond 1024."""
        _evict(self.by_shapes)
        self.by_shapes[shapes] = found

    def exclude(self, compiled: CompiledRegion, shapes: Shapes) -> None:
        """Record that this code may not run at these shapes; it may run at others."""
        _evict(self.excluded)
        self.excluded[compiled, shapes] = None

    def drop(self, compiled: CompiledRegion) -> None:
        """Remove wrong code."""
        self.compiled.remove(compiled)
        self.dropped += 1
        self.excluded = {each: None for each in self.excluded if each[0] is not compiled}  # other threads read the old

    def add(self, compiled: CompiledRegion, artifact: Callable[[], Artifact], shapes: Shapes) -> None:
        """Add new code for a call of these shapes. The table compares it before its first use, and stores its artifact
        if the results agree.
        """
        self.compiled.append(compiled)
        self.unverified[compiled] = _Unverified(artifact, made_for=shapes)

    def add_made(
        self, artifact: Artifact, compiled: CompiledRegion, shapes: Shapes, store: ArtifactStore | None
    ) -> None:
        """Add a worker's artifact. It is stored at once, because this process may end before a call compares it.
        compiled: the artifact's unpacked code. shapes: of the call that it was made for.
        """
        is_kept = store is not None and self.keep(store, lambda: artifact)
        self._add_unverified(compiled, artifact, artifact.name if is_kept else "", shapes)

    def _add_unverified(
        self, compiled: CompiledRegion, artifact: Artifact, stored: str, made_for: Shapes | None
    ) -> None:
        def make() -> Artifact:  # not of the unpacked code, which lacks the shared libraries
            return replace(artifact, about={**artifact.about, **measured(compiled)})

        self.compiled.append(compiled)
        was_compared = COMPARED_IN in artifact.about
        self.unverified[compiled] = _Unverified(make, stored, True, was_compared, made_for)

    def load(self, store: ArtifactStore) -> int:
        """Load stored artifacts that are not in memory yet. Returns their number. Discards invalid artifacts.

        Loads nothing while this process compiles, because the caller would wait: the queue loads the region later.
        """
        loaded = 0
        if not inductor_lock.acquire(blocking=False):
            return loaded
        try:
            for artifact in store.load(self.key, frozenset(self.stored)):
                try:
                    compiled = unpack(artifact)
                    if store.application in artifact.about.get(COMPARED_IN, ()):
                        self.compiled.append(compiled)
                    else:
                        self._add_unverified(compiled, artifact, artifact.name, made_for=None)
                    loaded += 1
                except InvalidArtifactError as error:
                    store.discard(artifact.name, str(error))
                except Exception as error:  # a temporary fault, or one of this process: the bytes are valid
                    if is_out_of_memory(error):
                        raise
                    store.leave(artifact.name, first_line(error))
                    logger.debug("Resolute: why", exc_info=True)
                self.stored.add(artifact.name)  # skipped if out of memory, so that a later call retries
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.warning("Resolute: the store cannot be used, so a region is compiled: %s", first_line(error))
            logger.debug("Resolute: why", exc_info=True)
        finally:
            inductor_lock.release()
        return loaded

    def keep(self, store: ArtifactStore, make: Callable[[], Artifact]) -> bool:
        """Store new code. Returns False on failure: the next process compiles again, this prompt is not affected."""
        try:
            artifact = make()
            self.stored.add(artifact.name)
            return store.save(artifact)  # raises nothing if the disk is full or denies the write
        except Exception as error:  # torch's classes raise any class
            logger.info("Resolute: %s is compiled again after a restart: %s", self.label, first_line(error))
            logger.debug("Resolute: why it is not kept", exc_info=True)
            return False


def _evict(latest: dict[Any, Any]) -> None:
    """Make room for one more entry of `_MOST_SHAPES`."""
    if len(latest) >= _MOST_SHAPES:
        del latest[next(iter(latest))]


@dataclass(frozen=True, eq=False)
class RegionCall:
    """One call of a region at new sizes, with everything needed to compile and to compare.

    weights: all weights of the block, in the order of `weight_inputs`.
    tensors: the inputs, in `region_format`.
    announce: shows the number of compiled regions of the module; called before and after a compile.
    verify: compare results even if the guards allow the sizes.
    """

    region: Region
    site: RegionSite
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    stats: Stats
    progress: Progress
    announce: Callable[[], None]
    verify: bool = False
    store: ArtifactStore | None = None

    @property
    def shapes(self) -> Shapes:
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    @property
    def static(self) -> Shapes:
        return static_sizes(self.site.dims, self.shapes)

    @property
    def fits(self) -> bool:
        """True if the inputs match the site's dimensions, and each named dimension has one size above 0."""
        sizes = bind_dims(self.site.dims, self.shapes)
        return sizes is not None and all(sizes.values())

    def fails(self, detail: str) -> BypassReason:
        """Record that compiling failed: the original runs at all sizes with these static ones. Returns the reason."""
        reason = self.region.failures[self.static] = BypassReason(BypassCode.COMPILE_FAILED, detail)
        self.stats.counters.compile_failures += 1
        return reason

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by dimension name."""
        sizes = bind_dims(self.site.dims, self.shapes)
        assert sizes is not None, f"{self.shapes} do not fit {self.site.dims}: `RegionTable.resolve` refuses them"
        return sizes


class DeferredCompiler(Protocol):
    """Compiles regions while calls run their originals. Implemented by `CompileQueue`."""

    @property
    def left(self) -> int:
        """The number of regions that have no code yet."""
        ...

    def awaits(self, region: Region) -> bool:
        """A call reached the region. Returns True if the region is queued or being compiled."""
        ...

    def note(self, call: RegionCall, found: CompiledRegion | BypassReason | None, is_foreseen: bool = False) -> None:
        """A call reached a region at new sizes, or will (is_foreseen). found: what runs there; None: compile it."""
        ...

    def finish(self, keys: Iterable[str], progress: Progress) -> None:
        """Wait until the regions with these keys are compiled. Raises cancellations."""
        ...


def trace_of(
    call: RegionCall,
    hints: dict[str, int] | None = None,
    oblivious: bool = True,
    yield_point: Callable[[], None] | None = None,
) -> Trace:
    """Trace the call's region. Arguments and errors as for `trace`; hints None: trace at general sizes."""
    site = call.site
    if hints is None:
        hints = general_hints(call.sizes, call.tensors[0].device)
    about = (hints, oblivious, site.without, site.attends, yield_point)
    return trace(site.function, site.module, call.tensors, site.dims, *about)
