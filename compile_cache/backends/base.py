"""The interface of a backend. CONTRIBUTING.md explains how to add one."""

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
from ..keys import Component, GraphKey
from ..modules.site import HookBuilder, Progress, SilentProgress
from ..telemetry.host_load import HostLoad
from ..telemetry.stats import Stats
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a backend on a type of device.

    reason, remedy: if the backend is not available, why, and what the user can do about it.
    keeps_graphs: a graph serves every weights epoch and is never evicted, because closing it frees no memory. Its
        method `refresh_weights(epoch)` points it at the module's current weights; False: the graph must be rebuilt.
    needs_static_weights: the backend refuses models whose weights are paged. Other backends also run on paged weights.
    detail: compiler, versions and limitations, as text for the user.
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
    """The module's method that a call invokes, for a backend that runs a converted copy of the module (OneFlow).

    `arguments(tensors)` returns the positional and keyword arguments, with `tensors` in place of the call's own.
    """

    name: str
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Located:
    """Region keys, grouped by where the compiled code is: in memory, in the store on disk, or not compiled yet."""

    in_memory: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module.

    tensors: in the order of the key's signature.
    invoke: runs the module's own code with `tensors` in place of the call's. A backend may call it several times, and
        must not keep or change the tensors.
    device: the device of the first tensor, "cuda:0" or "cpu".
    epoch: the weights epoch; equal numbers mean the same Parameters at the same addresses.
    torch_flags: torch's flags during the call, see flags.py.
    policy: how the call may run, and whether it may be repeated or captured.
    why_captured: the reason to report for a capture, if no difference between capture keys explains it.
    background_compile: regions without code run the original, and are compiled in the background.
    begins_run: the call is the first of a sampling run, or is outside any run.
    benchmark_eager: compiled code and the original run in turn and are timed, see `CompiledVsEager`.
    method: None if `invoke` does more than call one method of the module.
    weights: where the module's weights are while the call runs.
    """

    key: GraphKey
    tensors: Sequence[torch.Tensor]
    invoke: Callable[[Sequence[torch.Tensor]], Any]
    device: str
    epoch: int = 0
    torch_flags: tuple[Component, ...] = ()
    policy: CallPolicy = ANYTHING
    why_captured: str = ""
    benchmark_eager: bool = False
    background_compile: bool = False
    begins_run: bool = False
    progress: Progress = field(default_factory=SilentProgress)
    module: torch.nn.Module | None = None
    method: Method | None = None
    weights: Weights = field(default_factory=Weights)

    @property
    def is_timed(self) -> bool:
        """True if the call is timed for the comparison with the original. A call whose policy is eager is not; nor,
        unless `benchmark_eager` is set, a call that is not repeatable: it may do more than its key says.
        """
        comes = self.background_compile and self.policy.is_repeatable
        return (self.benchmark_eager or comes) and not self.policy.is_eager


class Graph(Protocol):
    """A captured forward for one exact signature. `bytes`: the device memory of the graph."""

    bytes: int

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Replay with `tensors` as inputs. The caller owns the result: it is never a static buffer of the graph."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """Facts about the device and the run before a capture. The defaults refuse no capture.

    peak: peak bytes that the run allocated; too high if the run compiled or compared regions.
    limit: a capture that needs more bytes is refused. spare: bytes that must stay free during the capture.
    host_share: the run's `RunCost.host_share`. least_host_share: below this share a capture gains nothing and is
    refused.
    """

    peak: int = 0
    limit: int = sys.maxsize
    spare: int = 0
    host_share: float = 1.0
    least_host_share: float = 0.0


class Code(Enum):
    """The state of the compiled code of all regions that a call runs."""

    MISSING = "missing"  # some region has no code yet
    UNVERIFIED = "unverified"  # some code has not been compared with its original yet
    READY = "ready"


class Program(ABC):
    """One module bound to one backend."""

    def __init__(self, owner: int, capabilities: Capabilities) -> None:
        self.owner = owner  # the module's number in this process, for CaptureKey
        self.capabilities = capabilities
        # Set by the latest `run` or `compare`. ran_compiled: False if every block ran eagerly. ran_originals: some
        # blocks ran their original because their code is still being compiled.
        self.ran_compiled, self.ran_originals = True, False

    def code_of(self, key: GraphKey) -> Code:
        """The state of the code of all regions that the latest call with this key ran."""
        return Code.READY

    def has_run(self, key: GraphKey) -> bool:
        """True if this program, not its stand-in, ran a call with the key and so knows which code is missing."""
        return True

    @property
    def regions(self) -> tuple[int, int]:
        """(compiled, total) distinct regions of this module."""
        return (0, 0)

    @property
    def blocks(self) -> dict[str, int]:
        """The number of blocks of this module that may be regions, by origin: "catalogued" or "recognised"."""
        return {}

    @property
    def quantized(self) -> frozenset[tuple[str, str]]:
        """Layouts of quantized weights in compiled blocks, each with the operator that multiplies by them; the operator
        is empty for weights that are dequantized first.
        """
        return frozenset()

    @property
    def region_keys(self) -> frozenset[str]:
        """Keys of the regions that calls of this module ran. A process that loads all of these compiles nothing."""
        return frozenset()

    @abstractmethod
    def run(self, call: Call) -> Any:
        """Run the call with the backend's compiled code. Compiles missing code, which can take minutes.

        Raises the module's own errors, and the exceptions of a cancelled prompt.
        """

    def compare(self, call: Call) -> Any:
        """Run the call as its first-tier capture runs it, and compare some of the code compiled since that capture."""
        return self.run(call)

    def close(self) -> None:  # noqa: B027
        """The module was garbage collected: release its blocks now, not at Python's next cycle collection."""

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> Graph:
        """Capture a graph for the call's signature, right after a `run` of the same call returned `result`.

        Raises CaptureError; its subclasses OverBudgetError and NoGainError if `facts` rule the capture out.
        """
        raise NotImplementedError(f"{type(self).__name__} does not capture")


class Backend(ABC):
    """One way to run modules. All threads share the one instance of each backend."""

    name: str

    def stored(self) -> dict[str, int]:
        """The store on disk: its number of `regions`, its `bytes`, and their `limit`; empty without a store."""
        return {}

    def ready_regions(self) -> int:
        """The number of regions with compiled code in memory, over all models; a shared region counts once."""
        return 0

    def failed_regions(self) -> list[str]:
        """One sentence for each region that could not be compiled: why not."""
        return []

    def retry_failed(self) -> None:  # noqa: B027
        """Let the next call of each failed region compile it again."""

    def compile_eta(self, more: int = 0) -> tuple[int, float | None]:
        """The number of regions being compiled, and the estimated seconds until these are compiled and `more` that no
        call has queued yet. The seconds are None until this process has compiled its first region.
        """
        return 0, 0.0

    def locate(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> Located:
        """Locate the compiled code of these regions for a device."""
        return Located()

    def preload(self, keys: Iterable[str], device: torch.device, config: CacheConfig) -> int:
        """Load regions from the store before the first call needs them. Returns the number of artifacts loaded."""
        return 0

    def prewarm(  # noqa: B027
        self, device: torch.device, config: CacheConfig, host: HostLoad, lacks_regions: bool = False
    ) -> None:
        """Start slow imports and processes in the background, before a module is bound. Returns at once.

        host: the host time that calls leave free. lacks_regions: a model used before lacks some of its compiled code.
        """

    @property
    def is_starting(self) -> bool:
        """True while `prewarm`'s background work runs, or the first regions are being loaded."""
        return False

    @abstractmethod
    def probe(self, device: str) -> Capabilities:
        """The backend's capabilities on a device type ("cuda", "cpu"). May wait for `prewarm`."""

    def probe_at_once(self, device: str) -> Capabilities:
        """`probe`, as far as the answer is known without waiting for `prewarm`."""
        return self.probe(device)

    @abstractmethod
    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        """Prepare to run one module. Compiles nothing yet. `owner`: the module's number in this process."""
