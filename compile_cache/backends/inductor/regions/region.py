"""A region that sites of equal structure share: its compiled code, and whether that code may run for a call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ....errors import BypassCode, BypassReason, first_line
from ....keys import Component, digest
from ....regions.site import Progress, RegionSite
from ....stats import Stats
from ....store.artifact_store import Artifact, ArtifactStore, InvalidArtifactError
from ....torch_facts.flags import without_attention
from ....torch_facts.out_of_memory import is_out_of_memory
from ..compile.artifacts import measured, unpack
from ..compile.compiled_region import CompiledRegion
from ..compile.private_cache import one_at_a_time
from ..compile.shape_guards import Verdict
from ..compile.tracing import Shapes, Trace, bind_dims, general_hints, static_sizes, trace
from .numerics_check import difference_from_original

logger = logging.getLogger(__name__)

_MOST_SHAPES = 1024  # that a region remembers
_UNVERIFIED = "unverified"  # in `Artifact.about`: no call compared the code yet

# A trace has no autocast in it, and compiled code casts nothing.
AUTOCAST = BypassReason(BypassCode.OBSERVED_INPUT, "another pack turned autocast on; blocks run eagerly inside it")

WRITES_TO_COPY = BypassReason(
    BypassCode.OBSERVED_INPUT, "a block writes into an input that is not contiguous; such a block runs eagerly"
)


def region_key(
    site: RegionSite,
    structure: str,
    tensors: Sequence[torch.Tensor],
    pattern: str,
    torch_flags: Sequence[Component] = (),
) -> str:
    """A digest of everything that two sites must have in common to share compiled code.

    structure: digest of the block and of the functions that it reaches. pattern: of its weights, see `cast_pattern`.
    torch_flags: what torch computes under, see `torch_flags`.
    """
    # The device with its index: generated code launches on the device that it was compiled for.
    inputs = tuple((str(tensor.dtype), str(tensor.device), tensor.ndim) for tensor in tensors)
    flags = tuple(torch_flags) if site.attends else without_attention(torch_flags)
    return digest((site.kind, site.dims, structure, inputs, pattern, flags))


@dataclass(frozen=True, eq=False)
class _Unverified:
    """Code that no comparison confirmed. artifact: makes the one to store after it. stored: the name of the one until
    then, empty if nothing is. is_made: by a worker. is_loaded: by an earlier process.
    """

    artifact: Callable[[], Artifact]
    stored: str = ""
    is_made: bool = False
    is_loaded: bool = False


@dataclass(eq=False)
class Region:
    """The compiled code that all sites of one `region_key` share, and the sizes at which there is none.

    label: the kind of block, for people. form: the digest of its structure and the dtype that it computes in; empty
    until a call comes to it.
    compiled: one, unless a call had sizes that its guards exclude.
    by_shapes: what runs at the latest shapes that were met: compiled code, or the original for a reason.
    failures: by static sizes: compiling failed, and is not tried again for any size of these.
    stored: names of the artifacts that were loaded from the store or saved to it.
    unverified: compiled code that no comparison has confirmed yet.
    """

    key: str
    label: str
    form: tuple[str, ...] = ()
    compiled: list[CompiledRegion] = field(default_factory=list)
    by_shapes: dict[Shapes, CompiledRegion | BypassReason] = field(default_factory=dict)
    failures: dict[Shapes, BypassReason] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    unverified: dict[CompiledRegion, _Unverified] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """It has code that is kept: compared with the original, or made elsewhere and compared by the next call."""
        found = [self.unverified.get(compiled) for compiled in list(self.compiled)]
        return any(each is None or each.is_made for each in found)

    def remember(self, shapes: Shapes, found: CompiledRegion | BypassReason) -> None:
        """Set what runs at these shapes."""
        if len(self.by_shapes) >= _MOST_SHAPES:
            del self.by_shapes[next(iter(self.by_shapes))]
        self.by_shapes[shapes] = found

    def add(self, compiled: CompiledRegion, artifact: Callable[[], Artifact]) -> None:
        """Add new code. `may_run` compares it before its first use, and stores its artifact if it is right."""
        self.compiled.append(compiled)
        self.unverified[compiled] = _Unverified(artifact)

    def add_made(self, artifact: Artifact, compiled: CompiledRegion, store: ArtifactStore | None) -> None:
        """Add what a worker made. It is stored at once, marked, since this process may end before a call compares it.
        compiled: what `unpack` makes of it.
        """
        marked = replace(artifact, about={**artifact.about, _UNVERIFIED: True})
        is_kept = store is not None and self.keep(store, lambda: marked)
        self._add_unverified(compiled, artifact, marked.name if is_kept else "")

    def _add_unverified(
        self, compiled: CompiledRegion, artifact: Artifact, stored: str, is_loaded: bool = False
    ) -> None:
        # The worker's artifact: what `unpack` made of it no longer has its shared libraries.
        about = {name: value for name, value in artifact.about.items() if name != _UNVERIFIED}
        self.compiled.append(compiled)
        self.unverified[compiled] = _Unverified(
            lambda: replace(artifact, about={**about, **measured(compiled)}), stored, True, is_loaded
        )

    def load(self, store: ArtifactStore) -> int:
        """Load the artifacts that are in the store and not in memory. Returns how many; discards invalid ones.

        Loads nothing while this process compiles, because a caller would wait for that: the queue loads it later.
        """
        loaded = 0
        if not one_at_a_time.acquire(blocking=False):
            return loaded
        try:
            for artifact in store.load(self.key, frozenset(self.stored)):
                try:
                    compiled = unpack(artifact)
                    if _UNVERIFIED in artifact.about:
                        self._add_unverified(compiled, artifact, artifact.name, is_loaded=True)
                    else:
                        self.compiled.append(compiled)
                    loaded += 1
                except InvalidArtifactError as error:
                    store.discard(artifact.name, str(error))
                except Exception as error:  # of this moment or this process: the bytes are right
                    if is_out_of_memory(error):
                        raise
                    store.leave(artifact.name, first_line(error))
                    logger.debug("Resolute: why", exc_info=True)
                self.stored.add(artifact.name)  # not if memory is short: a later call may find some
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.warning("Resolute: the store cannot be used, so a region is compiled: %s", first_line(error))
            logger.debug("Resolute: why", exc_info=True)
        finally:
            one_at_a_time.release()
        return loaded

    def keep(self, store: ArtifactStore, make: Callable[[], Artifact]) -> bool:
        """Store new code. Returns False where that fails: a compile in the next process, never this prompt."""
        try:
            artifact = make()
            self.stored.add(artifact.name)
            return store.save(artifact)  # raises nothing for a disk that is full or refuses
        except Exception as error:  # torch's classes raise any class
            logger.info("Resolute: %s is compiled again after a restart: %s", self.label, first_line(error))
            logger.debug("Resolute: why it is not kept", exc_info=True)
            return False


@dataclass(frozen=True, eq=False)
class RegionCall:
    """One call of a region at sizes that were not met before, with everything needed to compile and to compare.

    weights: all weights of the block, in the order of `weight_inputs`.
    tensors: the inputs, in `region_format`.
    announce: shows how many regions of the module are compiled; called when a compile begins and when it ended.
    verify: whether to compare results even where the guards allow the sizes.
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
        """True if the inputs have the site's dimensions, each name with one size above 0."""
        sizes = bind_dims(self.site.dims, self.shapes)
        return sizes is not None and all(sizes.values())

    def fails(self, detail: str) -> BypassReason:
        """No code can be made: originals run from now on, at all sizes that have these static ones. Returns why."""
        reason = self.region.failures[self.static] = BypassReason(BypassCode.COMPILE_FAILED, detail)
        self.stats.counters.compile_failures += 1
        return reason

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name of a dimension."""
        sizes = bind_dims(self.site.dims, self.shapes)
        assert sizes is not None, f"{self.shapes} do not fit {self.site.dims}: `RegionTable.resolve` refuses them"
        return sizes


class DeferredCompiler(Protocol):
    """Makes code while calls run originals: `CompileQueue`."""

    def awaits(self, region: Region) -> bool:
        """A call came to the region. Returns whether its code is being made."""
        ...

    def note(self, call: RegionCall, found: CompiledRegion | BypassReason | None, is_foreseen: bool = False) -> None:
        """A call came to a region at new sizes, or will. found: what runs there; None: its code has to be made."""
        ...

    def finish(self, keys: Iterable[str], progress: Progress) -> None:
        """Wait until the regions with these keys are compiled. Raises what cancels."""
        ...


def trace_of(
    call: RegionCall,
    hints: dict[str, int] | None = None,
    oblivious: bool = True,
    between: Callable[[], None] | None = None,
) -> Trace:
    """The trace of the call's region. The others: see `trace`; hints None: general sizes. Raises what that raises."""
    site = call.site
    if hints is None:
        hints = general_hints(call.sizes, call.tensors[0].device)
    about = (hints, oblivious, site.without, site.attends, between)
    return trace(site.function, site.module, call.tensors, site.dims, *about)


def may_run(call: RegionCall, compiled: CompiledRegion) -> bool:
    """Decide if compiled code of the call's region may run at the call's sizes. New code is then stored, else dropped.

    Raises torch's OutOfMemoryError where there is no memory to compare, NotComparedError where the call's values show
    nothing, and whatever cancels. The code then stays unverified, and the next call compares it.
    """
    region = call.region
    unverified = region.unverified.get(compiled)
    allowed = _allowed(call, compiled, call.verify or unverified is not None)
    if unverified is None:
        return allowed
    del region.unverified[compiled]
    if allowed:
        call.stats.counters.region_compiles += not unverified.is_loaded
        is_known = call.store is not None and region.keep(call.store, unverified.artifact)
    else:
        region.compiled.remove(compiled)
        is_known = compiled.guards.check(call.sizes)[0] is not Verdict.BROKEN  # else it may be right at other sizes
    if call.store is not None and unverified.stored and is_known:
        call.store.remove(unverified.stored)
    return allowed


def _allowed(call: RegionCall, compiled: CompiledRegion, verify: bool) -> bool:
    """Check the guards; compare results if they leave it open, or if `verify` is set."""
    kind, sizes = call.site.kind, call.sizes
    verdict, failed = compiled.guards.check(sizes)
    if verdict is Verdict.BROKEN:
        logger.info("Resolute: %s compiles again at %s, because its code needs %s", kind, sizes, failed)
        return False
    if not verify and (verdict is Verdict.HOLDS or compiled.guards.vouched(sizes) in compiled.confirmed):
        return True
    call.stats.counters.verifications += 1
    difference = difference_from_original(compiled, call.site, call.weights, call.tensors, call.progress.cancellations)
    if difference is not None:
        logger.info("Resolute: the code of %s is wrong at %s (%s)", kind, sizes, difference)
        return False
    if verdict is not Verdict.HOLDS:
        compiled.confirmed.add(compiled.guards.vouched(sizes))
    return True
