"""The interface of a backend. Adding one means one file here and one line in the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..config import CacheConfig
from ..errors import BypassReason
from ..keys import Component, GraphKey
from ..regions.region import HookBuilder, Progress, SilentProgress
from ..stats import Stats


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do on a device, and if it cannot run there, why and what to do about it.

    `reads_live_weights`: its graphs are `LiveWeightsGraph`s. `returns_memory`: what a graph takes comes back when it is
    closed; where not, no graph is closed to make room. `detail` says more about what runs, for people.
    """

    available: bool
    compiles: bool = False
    captures: bool = False
    reason: str = ""
    remedy: str = ""
    reads_live_weights: bool = False
    returns_memory: bool = True
    detail: str = ""


@dataclass(frozen=True, eq=False)
class Method:
    """The method of the module that a call is a call of, for a backend that runs another form of the same module.

    `arguments(tensors)` gives its positional and keyword arguments with `tensors` in place of the call's.
    """

    name: str
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Located:
    """Keys of regions that are in memory, that are kept from before, and that would have to be compiled."""

    in_memory: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its key, its tensors in the order of the signature, and how to call with other tensors.

    `invoke(tensors)` calls the module's original code with `tensors` in place of the originals; it may be called more
    than once and must not keep or change them. `method` is None where it does not simply call one of the module's own.
    """

    key: GraphKey
    tensors: Sequence[torch.Tensor]
    invoke: Callable[[Sequence[torch.Tensor]], Any]
    device: str
    epoch: int = 0
    state: tuple[Component, ...] = ()
    forward_bypass: BypassReason | None = None
    capture_blocker: BypassReason | None = None
    progress: Progress = field(default_factory=SilentProgress)
    module: torch.nn.Module | None = None
    method: Method | None = None


class Graph(Protocol):
    """A whole forward for one exact signature."""

    bytes: int

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run with `tensors`; the result is the caller's own, never a static buffer."""
        ...

    def close(self) -> None: ...


class LiveWeightsGraph(Graph, Protocol):
    """A graph that reads the module's present weights in each replay, wherever they went since it was made."""

    def refresh_weights(self, epoch: int) -> bool:
        """Whether it still can; where not, it is dropped and made anew. Asked before every replay.

        `epoch` numbers the state that the weights are in: the same number, the same Parameters at the same addresses.
        """
        ...


class Program(ABC):
    """One module bound to one backend."""

    def __init__(self, owner: int, capabilities: Capabilities) -> None:
        self.owner = owner  # in-process number of the module, for CaptureKey
        self.capabilities = capabilities

    @property
    def regions(self) -> tuple[int, int]:
        """(compiled, total) distinct regions of this module."""
        return (0, 0)

    @property
    def region_keys(self) -> frozenset[str]:
        """Keys of the regions that calls of this module ran through: with these, the next process compiles nothing."""
        return frozenset()

    @abstractmethod
    def run(self, call: Call) -> Any:
        """Run through whatever the backend compiled; compiles what is missing."""

    def capture(self, call: Call, result: Any) -> Graph:
        """Make a graph for this call's signature; a `run` of the same call came right before and gave `result`."""
        raise NotImplementedError(f"{type(self).__name__} does not capture")


class Backend(ABC):
    name: str

    def stored(self) -> dict[str, int]:
        """What it keeps over restarts: `regions`, `bytes`, and their `limit`; empty where it keeps nothing."""
        return {}

    def located(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> Located:
        """Where the regions with these keys are, for a device."""
        return Located()

    def preload(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> int:
        """Load regions that are kept, ahead of the first call. Returns how many it loaded."""
        return 0

    def prewarm(self, device: torch.device, config: CacheConfig) -> None:  # noqa: B027
        """A module will soon be bound and run: a time to start what takes a while. Returns at once."""

    @abstractmethod
    def probe(self, device: str) -> Capabilities:
        """Whether it can run on this type of device; cheap, and without side effects."""

    @abstractmethod
    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        """Prepare to run one module. Compiles nothing yet."""
