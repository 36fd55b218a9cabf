"""Regions: the repeated blocks of a model, compiled once for every latent shape.

An adapter that knows a model family describes its blocks as `Hook`s; a backend that compiles gives it the `run` to call
for each region. Nothing here compiles anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import BypassReason

# One entry per dimension of an input: a name makes it dynamic and equal wherever the name occurs, None keeps it static.
Dims = tuple[str | None, ...]
RegionFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class RegionSite:
    """One place where a region runs: `function(module, *tensors)` with `dims` for each tensor.

    Sites with equal `kind`, `dims` and module structure share one compiled artifact; only weights differ.
    """

    name: str  # where, for people: "input_blocks.4.1"
    kind: str  # which code: "ResBlock"
    module: torch.nn.Module
    function: RegionFunction
    dims: tuple[Dims, ...]
    without: tuple[str, ...] = ()  # children of the module that the function does not run


@dataclass(frozen=True, eq=False)
class Hook:
    """A replacement for one module's `forward`, in force only while a call runs through the regions."""

    module: torch.nn.Module
    forward: Callable[..., Any]
    sites: tuple[RegionSite, ...]


class RegionRunner(Protocol):
    """What a backend offers to the hooks."""

    def __call__(self, site: RegionSite, *tensors: torch.Tensor) -> Any: ...


class Progress(Protocol):
    """Watches a run from outside: shows progress, and may stop it between two units of work by raising.

    `cancellations` are the exceptions that mean "stop", whoever raises them: they are never taken for a failure.
    """

    cancellations: tuple[type[BaseException], ...]

    def raise_if_cancelled(self) -> None: ...

    def report(self, done: int, total: int, text: str) -> None: ...

    def detail(self, text: str) -> None:
        """Something about this call that is worth a line where people look."""
        ...


class SilentProgress:
    cancellations: tuple[type[BaseException], ...] = ()

    def raise_if_cancelled(self) -> None:
        pass

    def report(self, done: int, total: int, text: str) -> None:
        pass

    def detail(self, text: str) -> None:
        pass


# Builds the hooks of a module; `bypass` counts a block that has to run as it is.
HookBuilder = Callable[[RegionRunner, Callable[[BypassReason], None]], Sequence[Hook]]


@contextlib.contextmanager
def installed(hooks: Sequence[Hook]) -> Iterator[None]:
    """Route each hooked module through its hook for the length of one call, and leave no trace.

    An instance attribute shadows the class's `forward`; a module that has one already belongs to somebody else.
    """
    mine: list[dict[str, Any]] = []
    try:
        for hook in hooks:
            attributes = hook.module.__dict__
            if "forward" not in attributes:
                attributes["forward"] = hook.forward
                mine.append(attributes)
        yield
    finally:
        for attributes in mine:
            attributes.pop("forward", None)
