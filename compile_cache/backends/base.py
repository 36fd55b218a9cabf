"""The interface of a backend. CONTRIBUTING says how to add one."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from ..call_policy import ANYTHING, CallPolicy
from ..config import CacheConfig
from ..host_load import HostLoad
from ..keys import Component, GraphKey
from ..regions.site import HookBuilder, Progress, SilentProgress
from ..stats import Stats
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a backend on a type of device.

    reason, remedy: if not available, why, and what to do about it.
    keeps_graphs: a graph serves every weights epoch and is never evicted, because closing it frees no memory. Its
        method `refresh_weights(epoch)` points it at the module's present weights; False: it must be built anew.
    needs_static_weights: it refuses models whose weights are paged. Others also run on `Weights` with pages.
    detail: more about what runs, for people.
    """

    available: bool
    compiles: bool = False
    captures: bool = False
    reason: str = ""
    remedy: str = ""
    keeps_graphs: bool = False
    needs_static_weights: bool = False
    detail: str = ""


@dataclass(frozen=True, eq=False)
class Method:
    """Which method of the module a call calls, for a backend that runs another form of the same module (OneFlow).

    `arguments(tensors)` returns its positional and keyword arguments, with `tensors` in place of the call's own.
    """

    name: str
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Located:
    """Keys of regions, by where their compiled code is: in memory, in the store on disk, or nowhere yet."""

    in_memory: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module.

    tensors: in the order of the key's signature.
    invoke: calls the module's own code with `tensors` in place of the call's. A backend may call it several times; it
        must not keep or change the tensors.
    device: of the first tensor, "cuda:0" or "cpu".
    epoch: the weights epoch; equal numbers mean the same Parameters at the same addresses.
    torch_flags: that it computes under, see flags.py.
    policy: what may be done with it.
    why_captured: why a capture is made now, where nothing else says so.
    is_behind: what has no code yet runs its original, and is compiled behind the call.
    begins_run: it is the first one of a sampling run, or a call outside of any.
    is_compared: in turn with its original, which may be as fast as compiled code, see `WholeCalls`.
    method: None if `invoke` does more than to call one method of the module.
    weights: see `Weights`.
    """

    key: GraphKey
    tensors: Sequence[torch.Tensor]
    invoke: Callable[[Sequence[torch.Tensor]], Any]
    device: str
    epoch: int = 0
    torch_flags: tuple[Component, ...] = ()
    policy: CallPolicy = ANYTHING
    why_captured: str = ""
    is_compared: bool = False
    is_behind: bool = False
    begins_run: bool = False
    progress: Progress = field(default_factory=SilentProgress)
    module: torch.nn.Module | None = None
    method: Method | None = None
    weights: Weights = field(default_factory=Weights)

    @property
    def is_timed(self) -> bool:
        """It counts in its comparison: not if something else makes the call run eagerly, nor, if it is compared as it
        comes, where it does more than its key says.
        """
        comes = self.is_behind and self.policy.is_repeatable
        return (self.is_compared or comes) and not self.policy.is_eager


class Graph(Protocol):
    """A captured forward for one exact signature. `bytes`: the memory that it takes on the device."""

    bytes: int

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run with `tensors`. The result belongs to the caller: it is never a static buffer of the graph."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """Facts known before a capture, from the run before it and of the device. The defaults refuse no capture.

    peak: bytes that the run allocated at once. If it compiled or compared regions, it is too high.
    limit: a capture that needs more bytes is not made. spare: so many bytes more must be free while it is made.
    host_share: see `RunCost.host_share`, of that run. least_host_share: with less a capture gains nothing, so none is
    made.
    """

    peak: int = 0
    limit: int = sys.maxsize
    spare: int = 0
    host_share: float = 1.0
    least_host_share: float = 0.0


class Code(Enum):
    """The compiled code of all regions that a call runs."""

    COMING = "coming"  # some region has none yet
    CAME = "came"  # some code was not compared with its original yet
    READY = "ready"


class Program(ABC):
    """One module bound to one backend."""

    def __init__(self, owner: int, capabilities: Capabilities) -> None:
        self.owner = owner  # in-process number of the module, for CaptureKey
        self.capabilities = capabilities
        # Of the latest `run` or `compare`. ran_compiled: False if every block ran eagerly. ran_originals: in place of
        # code that will come.
        self.ran_compiled, self.ran_originals = True, False

    def code_of(self, key: GraphKey) -> Code:
        """Of the regions that the latest run of a call with this key came to."""
        return Code.READY

    def has_run(self, key: GraphKey) -> bool:
        """This program ran a call with the key, and so knows what it lacks; not if another one stood in for it."""
        return True

    @property
    def regions(self) -> tuple[int, int]:
        """(compiled, total) distinct regions of this module."""
        return (0, 0)

    @property
    def blocks(self) -> dict[str, int]:
        """How many blocks of this module may be regions, by how they were found: "catalogued" or "recognised"."""
        return {}

    @property
    def quantized(self) -> frozenset[tuple[str, str]]:
        """Layouts of quantized weights in compiled blocks, each with the operator of its product; an empty text where
        they are dequantized first.
        """
        return frozenset()

    @property
    def region_keys(self) -> frozenset[str]:
        """Keys of the regions that calls of this module ran. If the next process loads these, it compiles nothing."""
        return frozenset()

    @abstractmethod
    def run(self, call: Call) -> Any:
        """Run the call, by compiled code where the backend has some. Compiles what is missing, which can take minutes.

        Raises what the module raises, and whatever cancels.
        """

    def compare(self, call: Call) -> Any:
        """Run the call as its capture of the first tier does, and compare some of the code that came since then."""
        return self.run(call)

    def close(self) -> None:  # noqa: B027
        """The module was garbage collected: let go of its blocks now, not when Python next collects cycles."""

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> Graph:
        """Capture a graph for the call's signature, right after a `run` of the same call returned `result`.

        Raises CaptureError, and of that OverBudgetError and NoGainError if `facts` rule it out.
        """
        raise NotImplementedError(f"{type(self).__name__} does not capture")


class Backend(ABC):
    """One way to run modules. There is one instance of each backend; it is shared by all threads."""

    name: str

    def stored(self) -> dict[str, int]:
        """Contents of its store on disk: numbers of `regions` and `bytes`, and their `limit`; empty without a store."""
        return {}

    def ready_regions(self) -> int:
        """How many regions have compiled code in memory: of all models, each once."""
        return 0

    def failed_regions(self) -> list[str]:
        """Why there is no code of regions in the end, a sentence for each."""
        return []

    def retry_failed(self) -> None:  # noqa: B027
        """Compile those again, when a call comes to them."""

    def coming(self, more: int = 0) -> tuple[int, float | None]:
        """How many regions are being compiled, and in about how many seconds these are there, and `more` that no call
        left yet; None until the first one of this process is.
        """
        return 0, 0.0

    def located(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> Located:
        """Where the compiled code of these regions is, for a device."""
        return Located()

    def preload(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> int:
        """Load regions from the store before the first call needs them. Returns how many artifacts it loaded."""
        return 0

    def prewarm(  # noqa: B027
        self, device: torch.device, config: CacheConfig, host: HostLoad, lacks_regions: bool = False
    ) -> None:
        """A module will be bound and run soon: start slow imports and processes in the background. Returns at once.

        host: what calls leave. lacks_regions: a model that was used before lacks some of its compiled code.
        """

    @property
    def is_starting(self) -> bool:
        """`prewarm` has started something that is not done yet, or the first regions are being loaded."""
        return False

    @abstractmethod
    def probe(self, device: str) -> Capabilities:
        """Find out if it can run on a type of device ("cuda", "cpu"). Cheap, and without side effects."""

    @abstractmethod
    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        """Prepare to run one module. Compiles nothing yet. `owner`: the module's number in this process."""
