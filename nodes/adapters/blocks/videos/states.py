"""Blocks that carry frames from call to call: their state becomes inputs and outputs of their regions.

A block has one site for each state of its protocol, because its code depends on it: nothing is carried over yet, for
example, or the block gets a single frame. Height and width are symbols in all states, and so are frames, unless core's
parts of a video have few frame counts. A graph keeps no state: carried frames stay in the caller's list.
A picture needs few of the states. The others compile in the background if the shapes of their inputs are known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .....compile_cache.modules.site import Dims, Hook, RegionRunner, RegionSite
from .....compile_cache.modules.structure import structure_digest
from ...comfyui.module_attributes import ATTRIBUTES

# Maps of a video: batch, channels, frames, height, width. FIXED_FRAMES: a small frame count with separate code.
FRAMES: Dims = ("b", None, "t", "h", "w")
FIXED_FRAMES: Dims = ("b", None, None, "h", "w")
SINGLE = "single"  # a state: one frame


class States:
    """The sites of one block, by the name of a state. attends: see `RegionSite`."""

    def __init__(self, name: str, block: torch.nn.Module, attends: bool = False) -> None:
        self.name, self.block, self._attends = name, block, attends
        # Compute it now, not at the first call: some blocks keep tensors in attributes while they run.
        self._structure = structure_digest(block, policy=ATTRIBUTES)
        self._sites: dict[str, RegionSite] = {}
        self._sizes: dict[RegionSite, Sequence[tuple[int, int]]] = {}

    def get(
        self, state: str, function: Callable[..., Any], dims: Sequence[Dims], sizes: Sequence[tuple[int, int]] = ()
    ) -> RegionSite:
        """The site of a state, created on the first request; an empty state adds nothing to the kind. function: takes
        the block and a tensor per entry of `dims`. sizes: their channels (0: the first input's) and frames, if known.
        """
        if state in self._sites:
            return self._sites[state]
        kind = ".".join(filter(None, (type(self.block).__name__, state)))
        own = self._structure, self._attends
        site = RegionSite(self.name, kind, self.block, function, tuple(dims), (), *own, foreseen=self._foreseen)
        self._sites[state], self._sizes[site] = site, sizes
        return site

    def _foreseen(self, x: torch.Tensor) -> Iterator[tuple[RegionSite, list[torch.Tensor]]]:
        """See `RegionSite.foreseen`. Yields nothing for an encoder's block: some of its states may never occur."""
        batch, own, _, height, width = x.shape
        for site, sizes in self._sizes.items():
            if sizes and not self.name.startswith("encoder."):
                shapes = [(batch, channels or own, frames, height, width) for channels, frames in sizes]
                yield site, [x.new_empty((1,) * 5).expand(shape) for shape in shapes]

    @property
    def sites(self) -> tuple[RegionSite, ...]:
        return tuple(self._sites.values())


def by_frames(
    name: str, block: torch.nn.Module, run: RegionRunner, function: Callable[..., Any], attends: bool = False
) -> Hook:
    """The hook of a block that carries no frames over. A single frame has separate code."""
    states = States(name, block, attends)
    several, single = states.get("", function, (FRAMES,)), states.get(SINGLE, function, (FIXED_FRAMES,))
    return Hook(block, lambda x, *args, **kwargs: run(single if x.shape[2] == 1 else several, x), states.sites)


def bound(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """A site's function with its first arguments bound."""
    return functools.partial(function, *arguments)
