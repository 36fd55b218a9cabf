"""The order of a streamed model's pages: which weights stay on the device when not all of them fit.

DynamicVRAM evicts pages from the highest address down, so weights at low addresses stay. ComfyUI gives low addresses to
large weights. Then some kinds of blocks stream far more than others: these are bound by the transfer, and the bus idles
during the others. And the weights of prologues, which no step needs (see `split_blocks`), may be the largest.

In our order, weights outside blocks and weights of small modules come first. The large weights of blocks follow, so
that with any amount of memory all blocks stream about the same number of bytes. Weights that no step needs come last. A
small module keeps the host busy for longer than the bus: SDXL with 6 GiB free streams 277 modules of 2.4 MB on average
in core's order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from . import aimdo

_MOST = 4  # reorderings per model
_LARGE = 8 << 20  # bytes of a module: a smaller one crosses the bus before the host has launched the next copy
_MANY = 64  # small modules that stream in a step: from this number on, reordering pays off
_STEPS = 2  # in a row: in its first step a model streams as a whole


class PageOrder:
    """Records the blocks that a model streams, and orders its pages. It keeps modules alive; see `keep_only`."""

    def __init__(self) -> None:
        self._blocks: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        self._unneeded: set[torch.nn.Module] = set()
        self._has_news = False
        self._reordered = 0
        self._small = 0  # modules that crossed the bus since the last `reorder_pages`
        self._busy_steps = 0  # consecutive steps with many of them

    def knows(self, block: torch.nn.Module) -> bool:
        return block in self._blocks

    def streams(self, block: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        """Note a block that runs while some of its paged modules are not resident."""
        if block not in self._blocks:
            self._blocks[block] = modules
            self._has_news = True

    def count_streamed(self, size: int) -> None:
        """Count a module of `size` bytes that crosses the bus."""
        self._small += size < _LARGE

    def mark_unneeded(self, modules: Iterable[torch.nn.Module]) -> bool:
        """No step needs these modules. Returns True if one of them was not known as such."""
        new = set(modules) - self._unneeded
        self._unneeded |= new
        self._has_news = self._has_news or bool(new)
        return bool(new)

    def is_unneeded(self, module: torch.nn.Module) -> bool:
        return module in self._unneeded

    def keep_only(self, modules: Iterable[torch.nn.Module]) -> None:
        """Forget all other modules, which the model may no longer have."""
        paged = set(modules)
        if not all(paged.issuperset(own) for own in (*self._blocks.values(), self._unneeded)):
            self._blocks = {block: own for block, own in self._blocks.items() if paged.issuperset(own)}
            self._unneeded &= paged

    def reorder_pages(self, modules: list[torch.nn.Module]) -> bool:
        """Between two steps: reassign the addresses of a model's paged modules by the order, if steps recorded new
        blocks or unneeded modules.

        modules: in the order of their current addresses.
        This evicts all pages and so takes as long as loading them. Therefore nothing moves until a block was split or
        many small modules crossed the bus. Returns True if the addresses changed.
        """
        self._busy_steps = self._busy_steps + 1 if self._small >= _MANY else 0
        self._small = 0
        is_worth_it = bool(self._unneeded) or self._busy_steps >= _STEPS
        if not self._has_news or not is_worth_it or self._reordered >= _MOST:
            return False
        self._has_news = False
        wanted = order_of(modules, list(self._blocks.values()), self._unneeded)
        if wanted == modules or not aimdo.reassign_addresses(wanted):
            return False
        self._reordered += 1
        return True


def order_of(
    modules: Sequence[torch.nn.Module],
    blocks: Sequence[Sequence[torch.nn.Module]],
    unneeded: Collection[torch.nn.Module],
) -> list[torch.nn.Module]:
    """The order of `modules`. blocks: the modules of each block, in the order in which blocks run."""
    outside, last = (0, 0, 0), (2, 0, 0)
    places = dict.fromkeys(unneeded, last)
    for number, block in enumerate(blocks):
        kept = [each for each in block if each not in unneeded and aimdo.paged_bytes(each) >= _LARGE]
        left = sum(map(aimdo.paged_bytes, kept))
        # The smallest weights come last and are evicted first. Of blocks with equally many bytes left, neighbours are
        # not next to each other.
        for module in sorted(kept, key=aimdo.paged_bytes, reverse=True):
            place = (1, -left, _reversed_bits(number))
            places[module] = min(place, places.get(module, place))  # two blocks may share a module
            left -= aimdo.paged_bytes(module)
    return sorted(modules, key=lambda module: places.get(module, outside))


def _reversed_bits(number: int) -> int:
    return int(f"{number:032b}"[::-1], 2)
