"""The order of a streamed model's pages: which weights stay on the device when not all of them fit.

DynamicVRAM frees memory from the highest address down, so what has low addresses stays. ComfyUI gives low addresses to
large weights. Then some kinds of blocks stream far more than others: these are bound by the transfer, and the bus idles
during the others. And the weights of prologues, which no step needs (see `split_blocks`), may be the largest.

Here weights outside of blocks come first and those of small modules, then the large ones of blocks, so that with any
amount of memory each block streams about as many bytes as any other, and at the end what no step needs. A small module
keeps the host busy for longer than the bus: SDXL with 6 GiB free streams 277 modules of 2.4 MB on average, in core's
order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from ..comfyui import dynamic_vram

_MOST = 4  # times that a model's pages are put into another order
_LARGE = 8 << 20  # bytes of a module: a smaller one has crossed the bus before the host has sent the next one
_MANY = 64  # small modules that cross it in a step: so many are worth another order
_STEPS = 2  # in a row: in its first step a model crosses as a whole


class PageOrder:
    """The blocks that a model's calls showed, and the order that follows. It holds modules; see `keep_only`."""

    def __init__(self) -> None:
        self._blocks: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        self._spared: set[torch.nn.Module] = set()
        self._has_news = False
        self._arranged = 0
        self._small = 0  # modules that crossed the bus since the last look
        self._busy_steps = 0  # in a row, with many of them

    def knows(self, block: torch.nn.Module) -> bool:
        return block in self._blocks

    def streams(self, block: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        """A block runs and its paged modules are not all in place."""
        if block not in self._blocks:
            self._blocks[block] = modules
            self._has_news = True

    def crosses(self, size: int) -> None:
        """A module of so many bytes crosses the bus."""
        self._small += size < _LARGE

    def spare(self, modules: Iterable[torch.nn.Module]) -> bool:
        """No step needs these modules. Returns whether that is news."""
        new = set(modules) - self._spared
        self._spared |= new
        self._has_news = self._has_news or bool(new)
        return bool(new)

    def is_spared(self, module: torch.nn.Module) -> bool:
        return module in self._spared

    def keep_only(self, modules: Iterable[torch.nn.Module]) -> None:
        """Forget all other modules, which may be gone from the model."""
        paged = set(modules)
        if not all(paged.issuperset(own) for own in (*self._blocks.values(), self._spared)):
            self._blocks = {block: own for block, own in self._blocks.items() if paged.issuperset(own)}
            self._spared &= paged

    def arrange(self, modules: list[torch.nn.Module]) -> bool:
        """Between two steps: give the paged modules of a model their addresses in the order, if the steps showed
        something new.

        modules: in the order of their addresses now.
        All pages go meanwhile, so it takes as long as loading them: nothing moves until a block was split, or many
        small modules crossed the bus. Returns whether it did.
        """
        self._busy_steps = self._busy_steps + 1 if self._small >= _MANY else 0
        self._small = 0
        is_worth_it = bool(self._spared) or self._busy_steps >= _STEPS
        if not self._has_news or not is_worth_it or self._arranged >= _MOST:
            return False
        self._has_news = False
        wanted = order_of(modules, list(self._blocks.values()), self._spared)
        if wanted == modules or not dynamic_vram.lay_out(wanted):
            return False
        self._arranged += 1
        return True


def order_of(
    modules: Sequence[torch.nn.Module],
    blocks: Sequence[Sequence[torch.nn.Module]],
    spared: Collection[torch.nn.Module],
) -> list[torch.nn.Module]:
    """The order of `modules`. blocks: the modules of each block, in the order in which blocks run."""
    outside, last = (0, 0, 0), (2, 0, 0)
    places = dict.fromkeys(spared, last)
    for number, block in enumerate(blocks):
        kept = [each for each in block if each not in spared and dynamic_vram.paged_bytes(each) >= _LARGE]
        left = sum(map(dynamic_vram.paged_bytes, kept))
        # The smallest come last, where they are taken off. Of blocks with equally much left, neighbours do not follow
        # each other.
        for module in sorted(kept, key=dynamic_vram.paged_bytes, reverse=True):
            place = (1, -left, _reversed_bits(number))
            places[module] = min(place, places.get(module, place))  # two blocks may share a module
            left -= dynamic_vram.paged_bytes(module)
    return sorted(modules, key=lambda module: places.get(module, outside))


def _reversed_bits(number: int) -> int:
    return int(f"{number:032b}"[::-1], 2)
