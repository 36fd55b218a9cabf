"""Split the blocks of a model that streams: the part that depends on the time alone is computed once, and kept.

See `split_sites` for a block's prologue and its rest. Once the results of a prologue are known, weights that only the
prologue reads are no longer streamed and occupy no pages that others need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....compile_cache.backends.inductor.regions.prologue_cache import Inputs
from ....compile_cache.backends.inductor.regions.split_sites import SplitSite, SplitSites
from ....compile_cache.keys import Component
from ....compile_cache.modules.site import RegionRunner, RegionSite
from ....compile_cache.torch_compat.flags import torch_flags
from . import aimdo
from .paged_weights import PagedWeights

WithWeights = Callable[..., AbstractContextManager[None]]


@functools.cache
def _sites() -> SplitSites:
    return SplitSites()  # traces of the process, by structure


class SplitBlocks:
    """Runs the blocks of one model whose site lists the inputs that depend on the time."""

    def __init__(self, run: RegionRunner, weights: PagedWeights, with_weights: WithWeights) -> None:
        """with_weights: `with_weights(site, like, only, maps)` loads the weights of a site, see `streamed`."""
        self._run = run
        self._weights = weights
        self._with_weights = with_weights
        self._splits: dict[tuple[Any, ...], SplitSite | None] = {}

    def run(self, site: RegionSite, tensors: Inputs, times: Inputs) -> Any:
        """Returns the block's result, and raises its errors. A block that cannot be split runs whole."""
        like = tensors[0]
        flags = torch_flags(like.device.type)
        split = self._split(site, tensors, flags)
        if split is None:
            with self._with_weights(site, like):
                return self._run(site, *tensors)
        prologue_only = [site.module.get_submodule(name) for name in split.prologue_only]
        self._weights.mark_unneeded(aimdo.paged(prologue_only))

        def compute(several: Sequence[Inputs]) -> list[list[torch.Tensor]]:
            """The prologue's results for each of several times. Its weights are loaded once, without mapping pages."""
            with self._with_weights(site, like, split.reads, False):
                return split.prologue(site.module, several)

        ahead = functools.partial(self._weights.lookahead.other_times, times)
        place = (site.name, split.rest.structure, like.dtype, flags)
        kept = self._weights.kept.get(place, times, compute, ahead)
        with self._with_weights(split.rest, like):
            return self._run(split.rest, *tensors, *kept)

    def _split(self, site: RegionSite, tensors: Inputs, flags: tuple[Component, ...]) -> SplitSite | None:
        """The split of a block; the same object for equal calls, because regions are bound to its sites."""
        key = (site, flags, *((tensor.shape, tensor.dtype) for tensor in tensors))
        if key not in self._splits:
            # The first load maps no pages: a prologue would keep the pages that it mapped.
            loaded = functools.partial(self._with_weights, site, tensors[0], (), False)
            self._splits[key] = _sites().of(site, tensors, flags, loaded)
        return self._splits[key]
