"""Compiled blocks of a model that does not fit in memory: load each block's paged weights just before it runs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ....compile_cache.modules.site import Input, LendingRunner, RegionRunner, RegionSite, take_donated
from ....compile_cache.modules.slots import swapped
from ....compile_cache.modules.structure import parts
from . import aimdo
from .page_loading import Resident, loaded
from .paged_weights import PagedWeights

if TYPE_CHECKING:
    from .split_blocks import SplitBlocks


def streamed(run: LendingRunner, weights: PagedWeights) -> RegionRunner:
    """Wraps `run`: loads the weights of its site onto the device for the call. Calls `run` alone if all weights are
    resident, or if paging is not supported; a block with paged weights then runs eagerly.

    Loading overlaps with computing: the host launches the copies of a block while the GPU still computes the block
    before, and core has two buffers for weights without a page. Nothing is prefetched further ahead: core's operations
    between two blocks use the same buffers in turn, and would overwrite prefetched weights.
    """
    modules: dict[RegionSite, list[torch.nn.Module]] = {}
    resident = Resident()

    def modules_of(site: RegionSite) -> list[torch.nn.Module]:
        if site not in modules:
            modules[site] = [part for _, part in parts(site.module, site.without)]
        return modules[site]

    def count(size: int) -> None:
        weights.counters.streamed_bytes += size
        weights.order.count_streamed(size)

    @contextmanager
    def with_weights(
        site: RegionSite, like: torch.Tensor, only: Collection[str] = (), maps: bool = True
    ) -> Iterator[None]:
        """Inside, the site's modules have their loaded weights. like: the first input of the block. only: modules
        inside it, by name. maps: see `loaded`.
        """
        modules = [site.module.get_submodule(name) for name in only] or modules_of(site)
        with (
            loaded(aimdo.paged(modules), like.device, like.dtype, maps, count, resident) as found,
            swapped((module._parameters, name, weight) for module, name, weight in found),
        ):
            yield

    @functools.cache
    def split() -> SplitBlocks:
        from .split_blocks import SplitBlocks  # only here: it imports inductor

        return SplitBlocks(run, weights, with_weights)

    def run_streamed(site: RegionSite, *inputs: Input) -> Any:
        if not weights.streams:
            return run(site, *inputs)
        tensors = take_donated(inputs)
        times = [tensors[index] for index in site.times]
        weights.lookahead.at_block(times)
        weights.begin_block()
        if not weights.order.knows(site.module):
            weights.order.streams(site.module, aimdo.paged(modules_of(site)))
        if times:
            return split().run(site, tensors, times)
        return run(site, *tensors, lend=lambda: with_weights(site, tensors[0]))

    return run_streamed
