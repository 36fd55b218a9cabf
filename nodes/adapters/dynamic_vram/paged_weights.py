"""Weights that ComfyUI pages in and out behind fixed addresses (DynamicVRAM), as `Weights` of the core.

A capture over these addresses stays valid through an unload, a load and other LoRAs. Before each replay all pages are
faulted in and pinned, and their serials are compared with the last ones: one call for each contiguous range. If a page
was evicted in between, or ComfyUI loaded the model again, each module is checked and refilled if needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ....compile_cache.backends.cuda_graphs.memory import release_graph_memory
from ....compile_cache.backends.inductor.regions.prologue_cache import PrologueCache
from ....compile_cache.modules.slots import swapped
from ....compile_cache.telemetry.stats import Counters
from ....compile_cache.torch_compat.out_of_memory import is_out_of_memory
from ....compile_cache.weights import Weights
from . import aimdo
from .aimdo import Serials
from .page_order import PageOrder
from .timestep_lookahead import TimestepLookahead

logger = logging.getLogger(__name__)

Fill = Callable[[torch.nn.Module, torch.dtype], None]
_KEPT_BYTES = 1 << 30  # of prologues' results that are kept for later calls
_GAP = 32 << 20  # ranges this close share a page, or have at most one between them


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Neighbouring allocations of one reservation."""

    reservation: Any
    address: int
    bytes: int
    modules: tuple[torch.nn.Module, ...]


class PagedWeights(Weights):
    """The paged weights of one module and all modules below it.

    dtype: the compute dtype of all modules except those that the model declares in float32: Wan's patch embeddings get
        inputs in float32. A LoRA is applied in the dtype of a module's input.

    Not thread-safe: the cache's lock guards `pin` and the calls after it.
    """

    def __init__(
        self,
        fill: Fill | None = None,
        unsupported: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """fill: fills the pages of a module for a compute dtype; None for a model that is never paged. unsupported: the
        reason why only core can load this ComfyUI's pages; None if we can pin and fill them. counters: of the process.
        """
        self.counters = counters or Counters()
        self.kept = PrologueCache(_KEPT_BYTES, self.counters)
        self.lookahead = TimestepLookahead()
        self.order = PageOrder()
        self.dtype = torch.float32
        self.unsupported = unsupported
        self._fill_module = fill
        self._ranges: list[_Range] = []
        self._allocations: list[tuple[torch.nn.Module, Any]] = []  # in the order of addresses
        self._serials: list[Serials] | None = None  # of the pages when all modules were last filled
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._in_float32: set[int] = set()  # ids of modules
        self._may_move = True  # `reorder_pages` may change the pages' addresses
        self._may_release_cache = True  # unused cached memory: once per load, because that is slow
        self._only_moved = False  # `reorder_pages` ran since the last `survey`, and no load did
        self.is_in_place = False
        self.streamed = False  # in this sampling run
        self.bytes = 0

    @property
    def pages(self) -> bool:  # type: ignore[override]
        return bool(self._ranges)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.pages and not self.is_in_place and self.unsupported is None

    def survey(self, modules: Iterable[torch.nn.Module]) -> Hashable:
        """Find the paged modules again. Returns the address and size of each one, on which captures depend."""
        modules = list(modules)
        self._may_move = not aimdo.has_ranges_of_blocks(modules)
        found: list[tuple[torch.nn.Module, Any]]
        found = [(module, aimdo.allocation(module)) for module in aimdo.paged(modules)]
        self._allocations = sorted(found, key=lambda each: (id(each[1][0]), *each[1][1:]))
        self._find_ranges()
        self._in_float32 = aimdo.declared_in_float32([module for module, at in self._allocations])
        self.bytes = sum(each.bytes for each in self._ranges)
        self.order.keep_only(module for module, _ in self._allocations)
        if not self._only_moved:
            self.loaded()
        self._only_moved = False
        return tuple((id(module), address, size) for module, (_, address, size) in self._allocations)

    def mark_unneeded(self, modules: Iterable[torch.nn.Module]) -> None:
        """While the model streams, no step needs the weights of these modules: pin all others before them."""
        if self.order.mark_unneeded(modules):
            self._find_ranges()
            self._serials = None

    def reorder_pages(self) -> None:
        """After a call that streamed: move the pages into the fastest order for the next calls, see `PageOrder`.

        Earlier captures read the old addresses, so the caller must refresh the weights epoch next. The weights' values
        are the same, so kept results stay valid.
        """
        can_move = self.streams and self._may_move
        if can_move and self.order.reorder_pages([module for module, _ in self._allocations]):
            self._serials = None
            self._only_moved = True

    def step_bytes(self) -> tuple[int, int]:
        """Bytes of the weights that a step of this run needs, and of all weights; (0, 0) if the run did not stream."""
        if not self.streamed:
            return 0, 0
        sizes = [(size, self.order.is_unneeded(module)) for module, (*_, size) in self._allocations]
        return sum(size for size, unneeded in sizes if not unneeded), sum(size for size, _ in sizes)

    def run_ends(self) -> None:
        """A sampling run is over: drop the results that were kept for its later steps."""
        self.streamed = False
        self.kept.forget()
        self.lookahead.forget()

    def _find_ranges(self) -> None:
        """Find the ranges of all allocations. The ranges of unneeded modules come last."""
        self._ranges = []
        for last in (False, True):
            self._ranges += _ranges(
                [(*at, module) for module, at in self._allocations if self.order.is_unneeded(module) is last]
            )

    def moved(self) -> bool:
        """True if a paged module lost its pages or has other ones since `survey`: a LoRA may resize its weights."""
        if self._serials is not None:  # nothing was loaded since the last `pin`
            return False
        return any(aimdo.allocation(module) != at for module, at in self._allocations)

    def loaded(self) -> None:
        """ComfyUI loaded the model, perhaps with other LoRAs: check each module at the next `pin`."""
        self._serials, self._only_moved = None, False
        self.kept.forget()
        self._may_release_cache = True

    def pin(self) -> bool:
        """See `Weights.pin`. Fills missing and stale weights with core's own functions."""
        if self.pages and self.unsupported is not None:
            return False
        if self._pin():
            return True
        if not self._may_release_cache:
            return False
        self._may_release_cache = False
        self._release_cached_memory()
        return self._pin()

    def _pin(self) -> bool:
        faulted: list[_Range] = []
        serials: list[Serials] = []
        for each in self._ranges:
            found = aimdo.fault(each.reservation, each.address, each.bytes)
            if found is None:
                _unpin(faulted)
                return False
            faulted.append(each)
            serials.append(found)
        if serials == self._serials:
            return True
        filled = False
        try:
            filled = self._fill(serials)
        except Exception as error:  # the eager call lets core page them in, and core raises the error
            if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
                logger.warning("Resolute: paged weights could not be filled ahead", exc_info=error)
        finally:
            if not filled:
                _unpin(faulted)
        if filled:
            self._serials = serials
        return filled

    def begin_block(self) -> None:
        """Called before a block loads its weights. The first call of a sampling run releases the workspace of captures:
        a decoder's takes 1 GiB, which would evict as many bytes of weights in each step.
        """
        if not self.streamed:
            self.streamed = True
            self._release_cached_memory()

    def _release_cached_memory(self) -> None:
        """Release memory cached for captures and by torch, and let evicted pages be faulted in again."""
        release_graph_memory()
        torch.cuda.empty_cache()
        self.ran_out()

    def unpin(self) -> None:
        _unpin(self._ranges)

    def ran_out(self) -> None:
        for each in self._ranges:
            each.reservation.prioritize()  # above other models' pages, as in a load; evicted pages may be faulted in

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.is_in_place = True
        try:
            with swapped(self._places):
                yield
        finally:
            self.is_in_place = False

    def _fill(self, serials: Sequence[Serials]) -> bool:
        """Fill missing and stale modules. Returns False if there was no memory to load a module's pages after all."""
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for each, pages in zip(self._ranges, serials, strict=True):
            page = aimdo.page_bytes(each.reservation)
            first = aimdo.offset(each.reservation, each.address) // page
            for module in each.modules:
                if not _is_filled(module, pages, first, page):
                    assert self._fill_module is not None, "a paged model needs a function that fills its pages"
                    self._fill_module(module, torch.float32 if id(module) in self._in_float32 else self.dtype)
                    if not _is_filled(module, pages, first, page):
                        return False
                places += [(module._parameters, name, aimdo.as_weight(view)) for name, view in aimdo.views(module)]
        self._places = places
        return True


def _is_filled(module: torch.nn.Module, pages: Serials, first: int, page: int) -> bool:
    """True if the module's weights were filled into the pages that are mapped now.

    pages: serials of a range whose first page has the number `first`. page: bytes per page.
    """
    filled = aimdo.filled(module)
    if filled is None:
        return False
    reservation, address, size = aimdo.allocation(module)  # type: ignore[misc]
    start = aimdo.offset(reservation, address)
    begin, end = start // page - first, -(-(start + size) // page) - first
    return filled[: end - begin] == pages[begin:end]


def _ranges(found: Sequence[tuple[Any, int, int, torch.nn.Module]]) -> list[_Range]:
    """Merge neighbouring allocations into ranges. found: (reservation, address, bytes, module), by address."""
    groups: list[list[tuple[Any, int, int, torch.nn.Module]]] = []
    end = 0
    for each in found:
        if not groups or groups[-1][0][0] is not each[0] or each[1] - end >= _GAP:
            groups.append([])
            end = 0
        groups[-1].append(each)
        end = max(end, each[1] + each[2])
    ranges = []
    for group in groups:
        start = group[0][1]
        stop = max(address + size for _, address, size, _ in group)
        ranges.append(_Range(group[0][0], start, stop - start, tuple(module for *_, module in group)))
    return ranges


def _unpin(ranges: Iterable[_Range]) -> None:
    for each in ranges:
        each.reservation.unpin(each.address, each.bytes)
