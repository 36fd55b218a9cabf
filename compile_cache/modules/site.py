"""Regions: the repeated blocks of a model, compiled once for every latent shape.

An adapter that knows a model family describes its blocks as `Hook`s. A backend that compiles passes it a `run` to call
for each region. This module only describes regions; it compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import BypassReason
from .slots import swapped

# One entry per dimension of an input. A name makes the dimension dynamic; equal names mean equal sizes. None: static.
Dims = tuple[str | None, ...]
RegionFunction = Callable[..., Any]
# Hooks call it with the reason why a block runs its original.
Bypass = Callable[[BypassReason], None]


@dataclass(frozen=True, eq=False)
class RegionSite:
    """One place in a model where a region runs: `function(module, *tensors)`, with `dims` for each tensor.

    Sites with equal `kind`, `dims` and module structure share compiled code; only their weights differ.

    name: the place in the model, for users: "input_blocks.4.1".
    kind: the code that runs: "ResBlock".
    without: modules inside the module that the function does not run, by name.
    structure: a digest of the module and of everything else that the function depends on. None: the digest of the
        module alone (`structure_digest`).
    attends: False if the function surely computes no attention; then its key leaves out torch's attention switches.
    times: indices of the inputs that depend on the noise level alone (see `dependence`). They do not change the
        region's results.
    begins_block: True for the first share of a block. While its code is being compiled, running the site may raise
        StillMissingError; the caller then runs the whole block's original.
    foreseen: returns, for the site's first input, the sites that other calls of the same block run, each with inputs of
        the right shapes without data. A call that waits for no code queues them after all regions that calls need.
    """

    name: str
    kind: str
    module: torch.nn.Module
    function: RegionFunction
    dims: tuple[Dims, ...]
    without: tuple[str, ...] = ()
    structure: str | None = None
    attends: bool = True
    times: tuple[int, ...] = ()
    begins_block: bool = False
    foreseen: Callable[[torch.Tensor], Iterable[tuple[RegionSite, list[torch.Tensor]]]] | None = None


@dataclass(frozen=True, eq=False)
class Hook:
    """A replacement for one module's `forward`, installed only while a call runs through the regions.

    sites: the sites that are known before a call. A hook may make more while it runs.
    label: kind and name of the sites that it makes while it runs. structure: if it makes sites, a digest of the module:
    hooks of one kind and structure share their regions. origin: how the block was detected, for users.
    """

    module: torch.nn.Module
    forward: Callable[..., Any]
    sites: tuple[RegionSite, ...] = ()
    label: tuple[str, str] | None = None
    origin: str = "catalogued"
    structure: str = ""

    @property
    def labels(self) -> list[tuple[str, str]]:
        """Kind and name of every site."""
        return [(site.kind, site.name) for site in self.sites] + ([] if self.label is None else [self.label])


# An input of a region. A list of one tensor, not as the first input, donates it: the region empties the list, and frees
# the tensor after its last use.
Input = torch.Tensor | list[torch.Tensor]


Lend = Callable[[], AbstractContextManager[None]]


class RegionRunner(Protocol):
    """Runs one region for a hook. Returns what `site.function` returns."""

    def __call__(self, site: RegionSite, *inputs: Input) -> Any: ...


class LendingRunner(Protocol):
    """A backend's `RegionRunner`. lend: for a site whose weights are not in place, a context in which they are. An
    original loads its own weights.
    """

    def __call__(self, site: RegionSite, *inputs: Input, lend: Lend | None = None) -> Any: ...


def take_donated(inputs: Sequence[Input]) -> list[torch.Tensor]:
    """Return the tensors of inputs, and remove donated ones from their lists."""
    return [each.pop() if isinstance(each, list) else each for each in inputs]


class Progress(Protocol):
    """Shows the progress of a call, and can cancel the call.

    `cancellations` are the exceptions that mean "cancelled", also when other code raises them. They are always
    re-raised, and never counted as a failure.
    """

    cancellations: tuple[type[BaseException], ...]

    def raise_if_cancelled(self) -> None:
        """Called between two units of work."""
        ...

    def begin_block(self) -> None:
        """A block of the call is about to run. Raises if the call is cancelled."""
        ...

    def prompt_runs(self) -> bool:
        """Return True while a prompt runs, this call's or another one."""
        ...

    def cancel_again(self) -> None:
        """Cancel the running prompt again: a cancellation was raised outside its thread, and had no effect on it."""
        ...

    def report(self, done: int, total: int) -> None:
        """`done` of `total` units are done."""
        ...


class SilentProgress:
    cancellations: tuple[type[BaseException], ...] = ()

    def raise_if_cancelled(self) -> None:
        pass

    def begin_block(self) -> None:
        pass

    def prompt_runs(self) -> bool:
        return False

    def cancel_again(self) -> None:
        pass

    def report(self, done: int, total: int) -> None:
        pass


# (run, bypass) -> the hooks of a module. `run` leads through the weights' paging to `RegionBinding.run`. The hooks call
# `bypass(reason)` for a block that must run its original.
HookBuilder = Callable[[LendingRunner, Bypass], Sequence[Hook]]


def installed(hooks: Sequence[Hook]) -> AbstractContextManager[None]:
    """Install the hooks for one call, and remove them afterwards. Of two hooks for one module, the first counts.

    A hook is an instance attribute that shadows the class's `forward`. A module that already has such an attribute was
    patched by another pack, and is not hooked.
    """
    own = [(hook.module.__dict__, hook) for hook in reversed(hooks)]
    return swapped((attributes, "forward", hook.forward) for attributes, hook in own if "forward" not in attributes)
