"""Which calls are faster as they are: measured, for calls of which that is not known beforehand.

A region may be faster by itself and its module slower with it: it gives its result in another layout, and what comes
after it copies that. So a whole call is compared, by calls that come anyway: a size class runs compiled and as it is
in turn, until each was timed _RUNS times, and from then on by the faster way. Nothing runs twice, and no call needs
more memory than one of the two ways alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import BypassCode, BypassReason
from ..keys import CaptureKey, digest
from ..stats import Stats
from ..torch_facts.out_of_memory import is_out_of_memory
from .machine_table import MachineTable, machine_of, sizes_in, text_in

logger = logging.getLogger(__name__)

# That count, for each way, the fastest. A first one may load kernels, and another program may have kept the GPU busy.
_RUNS = 2
_WAITED = 0.02  # a call of which a larger share went to compiling, loading or capturing is not timed

_BEING_COMPARED = BypassReason(
    BypassCode.NOT_FASTER, "this call runs as it is, to measure whether compiled code is faster on this device"
)


class Stopwatch(Protocol):
    """Times what a device does, from when it was made."""

    def stop(self) -> None: ...

    def seconds(self, wait: bool) -> float | None:
        """After `stop`; None if the device is not there yet. wait: for it."""
        ...


class CudaStopwatch:
    """Two events on the current stream of a device. The host goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._record(0)

    def stop(self) -> None:
        self._record(1)

    def _record(self, number: int) -> None:
        with torch.cuda.device(self._device):
            self._events[number].record()

    def seconds(self, wait: bool) -> float | None:
        before, after = self._events
        if wait:
            after.synchronize()
        is_over: bool = after.query()  # type: ignore[no-untyped-call]
        return before.elapsed_time(after) / 1000 if is_over else None


def stopwatch_on(device: torch.device) -> Stopwatch | None:
    """A new stopwatch; None on a device where calls are not compared: compiled code gains nothing on a CPU."""
    return CudaStopwatch(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class Timed:
    """The runs of one way that count, and of the fastest of them the seconds for each number of its latent."""

    runs: int = 0
    pace: float = 0.0

    def with_run(self, pace: float) -> Timed:
        return Timed(self.runs + 1, min(self.pace or pace, pace))


@dataclass(frozen=True)
class Comparison:
    """model, role, shape: of the latest call that was timed, for people."""

    model: str
    role: str
    shape: tuple[int, ...]
    compiled: Timed = Timed()
    original: Timed = Timed()

    @property
    def is_settled(self) -> bool:
        return min(self.compiled.runs, self.original.runs) >= _RUNS

    @property
    def is_slower(self) -> bool:
        """Compiled calls are not faster."""
        return self.is_settled and self.compiled.pace >= self.original.pace

    @property
    def runs_original(self) -> bool:
        """The next call runs as it is. Compiled ones are timed first."""
        return self.is_slower if self.is_settled else self.compiled.runs > self.original.runs

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a call of `shape`: compiled, and as it is."""
        return self.compiled.pace * prod(self.shape), self.original.pace * prod(self.shape)


class ComparisonTable(MachineTable[str, Comparison]):
    """By the digest of a size class."""

    what, format = "comparisons of compiled calls", 1

    def plain(self, key: str, value: Comparison) -> dict[str, Any]:
        return {"class": key, **asdict(value)}

    def entry(self, data: Any) -> tuple[str, Comparison]:
        compiled, original = (_timed(data[name]) for name in ("compiled", "original"))
        model, role = text_in(data["model"]), text_in(data["role"])
        return text_in(data["class"]), Comparison(model, role, sizes_in(data["shape"]), compiled, original)


def _timed(data: Any) -> Timed:
    (runs,), pace = sizes_in([data["runs"]]), float(data["pace"])
    if not isfinite(pace) or pace < 0 or (pace == 0) != (runs == 0):
        raise ValueError(f"{pace} is no time of {runs} runs")
    return Timed(runs, pace)


class _Run(NamedTuple):
    """A call that was timed, and its seconds that went to compiling, loading or capturing."""

    key: CaptureKey
    size_class: str
    is_original: bool
    watch: Stopwatch
    waited: float


class WholeCalls:
    """Chooses between compiled code and the original for whole calls. GraphCache's lock guards it."""

    def __init__(
        self,
        stats: Stats,
        folder: Path | None = None,
        source: str = "",
        stopwatch: Callable[[torch.device], Stopwatch | None] = stopwatch_on,
    ) -> None:
        """folder: None keeps nothing on disk. source: a digest of the code that models run. stopwatch: see
        `stopwatch_on`.
        """
        self._stats, self._folder, self._source, self._stopwatch = stats, folder, source, stopwatch
        self._tables: dict[str, ComparisonTable] = {}
        self._without_memory: set[tuple[str, str]] = set()  # devices and size classes whose original found too little
        self._run: _Run | None = None  # the device may not have finished it yet

    def reason(self, key: CaptureKey) -> BypassReason | None:
        """Why a call runs as it is; None if it runs compiled."""
        found = self._table(key.device).get(_size_class(key))
        if found is None or not found.runs_original or (key.device, _size_class(key)) in self._without_memory:
            return None
        return _left_alone(found) if found.is_settled else _BEING_COMPARED

    @contextmanager
    def timed(self, key: CaptureKey | None) -> Iterator[None]:
        """A call runs inside, by what `reason` says. key: None for a call that is not compared.

        Where the original finds too little memory, calls of its size class run compiled from then on.
        """
        self._read(wait=key is not None)
        if key is None:
            yield
            return
        found = self._table(key.device).get(_size_class(key))
        is_original = self.reason(key) is not None
        watch = None if found is not None and found.is_settled else self._stopwatch(torch.device(key.device))
        waited, eager = self._stats.waiting_seconds(), self._stats.counters.eager_calls
        try:
            yield
        except Exception as error:
            if is_original and is_out_of_memory(error):
                self._without_memory.add((key.device, _size_class(key)))
            raise
        if watch is None:
            return
        watch.stop()
        if is_original or self._stats.counters.eager_calls == eager:  # else the original ran in place of compiled code
            self._run = _Run(key, _size_class(key), is_original, watch, self._stats.waiting_seconds() - waited)

    def _read(self, wait: bool) -> None:
        """Take over the time of the latest run, if the device has finished it. wait: for that."""
        run = self._run
        seconds = None if run is None else run.watch.seconds(wait)
        if run is None or seconds is None:
            return
        self._run = None
        table, graph = self._table(run.key.device), run.key.graph
        shape = graph.signature.latent_shape
        if seconds <= 0 or not prod(shape) or run.waited > _WAITED * seconds:
            return
        found = table.get(run.size_class) or Comparison(graph.model[:12], graph.role.value, shape)
        pace = seconds / prod(shape)
        if run.is_original:
            found = replace(found, shape=shape, original=found.original.with_run(pace))
        else:
            found = replace(found, shape=shape, compiled=found.compiled.with_run(pace))
        table.set(run.size_class, found)
        if found.is_slower:
            logger.info("Resolute: %s", _left_alone(found).detail)

    def measure_again(self) -> None:
        """Compare every call again, whatever this process or an earlier one found. From any thread, between calls."""
        self._run = None
        self._without_memory.clear()
        for table in list(self._tables.values()):
            table.clear()

    def report(self) -> list[dict[str, Any]]:
        """Each comparison, as JSON. seconds, original_seconds: for `shape`, 0 before a first run."""
        return [
            {
                "device": device, "model": found.model, "role": found.role, "shape": list(found.shape),
                "seconds": found.seconds[0], "original_seconds": found.seconds[1],
                "is_settled": found.is_settled, "is_left_alone": found.is_slower,
            }
            for device, table in list(self._tables.items())
            for _, found in table
        ]  # fmt: skip

    def _table(self, device: str) -> ComparisonTable:
        if device not in self._tables:
            self._tables[device] = ComparisonTable(self._folder, (*machine_of(torch.device(device)), self._source))
        return self._tables[device]


def _size_class(key: CaptureKey) -> str:
    """The same for calls of one model whose latents have about as many numbers, within a power of two."""
    graph = key.graph
    latent = graph.signature.tensors[0][1]
    is_video = len(latent.shape) == 5 and latent.shape[2] > 1
    kind = (graph.model, graph.role.value, graph.backend, latent.dtype, is_video, key.torch_flags)
    return digest((*kind, prod(latent.shape).bit_length()))


def _left_alone(found: Comparison) -> BypassReason:
    compiled, original = found.seconds
    what = f"{found.role} of {'x'.join(map(str, found.shape))}"
    detail = f"{what} takes {compiled:.3g} s compiled and {original:.3g} s as it is on this device: it is left alone"
    return BypassReason(BypassCode.NOT_FASTER, detail)
