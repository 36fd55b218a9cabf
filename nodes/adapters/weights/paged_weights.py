"""Weights that ComfyUI pages in and out behind fixed addresses (DynamicVRAM), as `Weights` of the core.

A capture over these addresses stays valid through an unload, a load and other LoRAs. Before each replay all pages are
faulted in and pinned, and their serials compared with those of the last time: one call for each contiguous range. If a
page went in between, or ComfyUI loaded the model again, each module is looked at and filled where it must be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ....compile_cache.backends.cuda_graphs.memory import release_graph_memory
from ....compile_cache.regions.kept_results import KeptResults
from ....compile_cache.regions.slots import swapped
from ....compile_cache.stats import Counters
from ....compile_cache.torch_facts.out_of_memory import is_out_of_memory
from ....compile_cache.weights import Weights
from ..comfyui import dynamic_vram
from ..comfyui.dynamic_vram import Serials
from .foresight import Foresight
from .page_order import PageOrder

logger = logging.getLogger(__name__)

Fill = Callable[[torch.nn.Module, torch.dtype], None]
_KEPT_BYTES = 1 << 30  # of results that prologues leave for later calls
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

    dtype: that the model computes in, but for modules that it declares in float32 among others: Wan's patch embeddings
        get inputs in float32. A LoRA is applied in the dtype of a module's input.

    Nothing here is thread-safe: the cache's lock guards `pin` and what follows.
    """

    def __init__(
        self,
        fill: Fill | None = None,
        unsupported: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """fill: fills the pages of a module whose weights compute in a dtype; for a model that is never paged, None.
        unsupported: why this ComfyUI's pages are left to core; None if they can be pinned and filled. counters: of the
        process.
        """
        self.counters = counters or Counters()
        self.kept = KeptResults(_KEPT_BYTES, self.counters)
        self.foresight = Foresight()
        self.order = PageOrder()
        self.dtype = torch.float32
        self.unsupported = unsupported
        self._fill_module = fill
        self._ranges: list[_Range] = []
        self._allocations: list[tuple[torch.nn.Module, Any]] = []  # in the order of addresses
        self._serials: list[Serials] | None = None  # of the pages when every module was known to be filled
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._in_float32: set[int] = set()  # ids of modules
        self._may_move = True  # pages, to other addresses
        self._may_ask = True  # for memory that is kept and not in use; once for each load, since it takes a while
        self._only_moved = False  # since the last `survey`, by `arrange`
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
        """Find the paged modules anew. Returns what captures depend on: where each one's weights are."""
        modules = list(modules)
        self._may_move = not dynamic_vram.has_ranges_of_blocks(modules)
        found: list[tuple[torch.nn.Module, Any]]
        found = [(module, dynamic_vram.allocation(module)) for module in dynamic_vram.paged(modules)]
        self._allocations = sorted(found, key=lambda each: (id(each[1][0]), *each[1][1:]))
        self._find_ranges()
        self._in_float32 = dynamic_vram.declared_in_float32([module for module, at in self._allocations])
        self.bytes = sum(each.bytes for each in self._ranges)
        self.order.keep_only(module for module, _ in self._allocations)
        if not self._only_moved:
            self.loaded()
        self._only_moved = False
        return tuple((id(module), address, size) for module, (_, address, size) in self._allocations)

    def spare(self, modules: Iterable[torch.nn.Module]) -> None:
        """While the model streams, no step needs the weights of these modules: others get pages before them."""
        if self.order.spare(modules):
            self._find_ranges()
            self._serials = None

    def arrange(self) -> None:
        """After a call that streamed: put the pages into the order that makes the next ones fastest, see `PageOrder`.

        Captures of before read other addresses, so the weights epoch must be brought up to date next. The weights are
        the same, so what was computed from them stays.
        """
        can_move = self.streams and self._may_move
        if can_move and self.order.arrange([module for module, _ in self._allocations]):
            self._serials = None
            self._only_moved = True

    def step_bytes(self) -> tuple[int, int]:
        """Bytes of the weights that a step of this run needs, and of all; (0, 0) if it did not stream."""
        if not self.streamed:
            return 0, 0
        sizes = [(size, self.order.is_spared(module)) for module, (*_, size) in self._allocations]
        return sum(size for size, spared in sizes if not spared), sum(size for size, _ in sizes)

    def run_ends(self) -> None:
        """A sampling run is over, and with it what was kept for its later steps."""
        self.streamed = False
        self.kept.forget()
        self.foresight.forget()

    def _find_ranges(self) -> None:
        """Find the ranges of all allocations: those of spared modules come last."""
        self._ranges = []
        for last in (False, True):
            self._ranges += _ranges(
                [(*at, module) for module, at in self._allocations if self.order.is_spared(module) is last]
            )

    def moved(self) -> bool:
        """True if a paged module has other pages than at the last `survey`, or none: a LoRA may resize its weights."""
        if self._serials is not None:  # nothing was loaded since the last `pin`
            return False
        return any(dynamic_vram.allocation(module) != at for module, at in self._allocations)

    def loaded(self) -> None:
        """ComfyUI loaded the model, perhaps with other LoRAs: look at each module at the next `pin`."""
        self._serials, self._only_moved = None, False
        self.kept.forget()
        self._may_ask = True

    def pin(self) -> bool:
        """See `Weights.pin`. It fills what is missing or stale by core's own functions."""
        if self.pages and self.unsupported is not None:
            return False
        if self._pin():
            return True
        if not self._may_ask:
            return False
        self._may_ask = False
        self._ask_for_memory()
        return self._pin()

    def _pin(self) -> bool:
        faulted: list[_Range] = []
        serials: list[Serials] = []
        for each in self._ranges:
            found = dynamic_vram.fault(each.reservation, each.address, each.bytes)
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
        except Exception as error:  # core pages the weights in itself, and raises what is wrong with them
            if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
                logger.warning("Resolute: paged weights could not be filled ahead", exc_info=error)
        finally:
            if not filled:
                _unpin(faulted)
        if filled:
            self._serials = serials
        return filled

    def begin_block(self) -> None:
        """A block gets its weights just before it runs. Before the first one of a sampling run goes what captures only
        work in: a decoder's takes 1 GiB, which would push out as many weights in each step.
        """
        if not self.streamed:
            self.streamed = True
            self._ask_for_memory()

    def _ask_for_memory(self) -> None:
        """Release what is kept for captures and by torch, and let pages come that went."""
        release_graph_memory()
        torch.cuda.empty_cache()
        self.ran_out()

    def unpin(self) -> None:
        _unpin(self._ranges)

    def ran_out(self) -> None:
        for each in self._ranges:
            each.reservation.prioritize()  # its pages come before those of other models, as in a load

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.is_in_place = True
        try:
            with swapped(self._places):
                yield
        finally:
            self.is_in_place = False

    def _fill(self, serials: Sequence[Serials]) -> bool:
        """Fill what is missing. Returns False if a load of the pages found no room after all."""
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for each, pages in zip(self._ranges, serials, strict=True):
            page = dynamic_vram.page_bytes(each.reservation)
            first = dynamic_vram.offset(each.reservation, each.address) // page
            for module in each.modules:
                if not _is_filled(module, pages, first, page):
                    assert self._fill_module is not None, "a paged model needs a function that fills its pages"
                    self._fill_module(module, torch.float32 if id(module) in self._in_float32 else self.dtype)
                    if not _is_filled(module, pages, first, page):
                        return False
                places += [
                    (module._parameters, name, dynamic_vram.as_weight(view))
                    for name, view in dynamic_vram.views(module)
                ]
        self._places = places
        return True


def _is_filled(module: torch.nn.Module, pages: Serials, first: int, page: int) -> bool:
    """True if the module's weights were filled into the very pages that are mapped now.

    pages: serials of the range that begins with page number `first`; page: bytes of one.
    """
    filled = dynamic_vram.filled(module)
    if filled is None:
        return False
    reservation, address, size = dynamic_vram.allocation(module)  # type: ignore[misc]
    start = dynamic_vram.offset(reservation, address)
    begin, end = start // page - first, -(-(start + size) // page) - first
    return filled[: end - begin] == pages[begin:end]


def _ranges(found: Sequence[tuple[Any, int, int, torch.nn.Module]]) -> list[_Range]:
    """found: (reservation, address, bytes, module), in the order of addresses."""
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
