"""Which calls are faster as they are: measured, for calls of which that is not known beforehand.

A region may be faster by itself and its module slower with it: it gives its result in another layout, and what comes
after it copies that. So a whole call is compared, by calls that come anyway: each size runs compiled and eager in turn,
until each way was timed _RUNS times, and from then on its size class runs the faster way. Nothing runs twice, and no
call needs more memory than one of the two ways alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import BypassCode, BypassReason
from ..keys import CaptureKey, digest
from ..stats import Stats
from ..torch_facts.out_of_memory import is_out_of_memory
from .machine import machine_of
from .stopwatch import Stopwatch, stopwatch_on
from .tuner import Trial, Tuner

logger = logging.getLogger(__name__)

# That count, for each way, the fastest. A first one may load kernels, and another program may have kept the GPU busy.
_RUNS = 2
_WAITED = 0.02  # a call of which a larger share went to compiling, loading or capturing is not timed

_BEING_COMPARED = BypassReason(
    BypassCode.NOT_FASTER, "this call runs eagerly, to measure whether compiled code is faster on this device"
)
COMPILED, ORIGINAL = "compiled", "original"


@dataclass(frozen=True)
class Size:
    """A key of a comparison. size_class: see `_size_class`. model, role: for people. shape: of the latent.

    Times of two shapes are not compared: a larger latent may take less for each element.
    """

    size_class: str
    shape: tuple[int, ...]
    model: str
    role: str


def _is_settled(trial: Trial) -> bool:
    return min(trial.runs.get(way, 0) for way in (COMPILED, ORIGINAL)) >= _RUNS


def _runs_original(trial: Trial) -> bool:
    """The next call runs eager. Compiled ones are timed first, and have to be faster."""
    if _is_settled(trial):
        return trial.seconds[COMPILED] >= trial.seconds[ORIGINAL]
    return trial.runs.get(COMPILED, 0) > trial.runs.get(ORIGINAL, 0)


class _Run(NamedTuple):
    """A call that was timed, and its seconds that went to compiling, loading or capturing."""

    device: str
    size: Size
    way: str
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
        """folder: None keeps nothing on disk. source: a digest of the code that models run. stopwatch: None for a
        device where calls are not compared: compiled code gains nothing on a CPU.
        """
        self._stats, self._stopwatch = stats, stopwatch
        self._tuner = Tuner[Size, Trial](
            "comparisons of compiled calls", Size, Trial, folder, lambda device: (*machine_of(device), source)
        )
        self._settled: dict[str, dict[str, Size]] = {}  # by device and size class: the size that decides
        self._without_memory: set[tuple[str, str]] = set()  # devices and size classes whose original found too little
        self._run: _Run | None = None  # the device may not have finished it yet

    def reason(self, key: CaptureKey) -> BypassReason | None:
        """Why a call runs eager; None if it runs compiled."""
        return self._reason(key.device, _size_of(key))

    def _reason(self, device: str, size: Size) -> BypassReason | None:
        known = self._known(device, size)
        if known is None or not _runs_original(known[1]) or (device, size.size_class) in self._without_memory:
            return None
        return _left_alone(*known) if _is_settled(known[1]) else _BEING_COMPARED

    def _known(self, device: str, size: Size) -> tuple[Size, Trial] | None:
        """The size that decides for another one: the first of its class that is settled, or else itself."""
        if device not in self._settled:
            entries = reversed(self._tuner.on(device))
            self._settled[device] = {each.size_class: each for each, trial in entries if _is_settled(trial)}
        decides = self._settled[device].get(size.size_class, size)
        trial = self._tuner.get(device, decides)
        return None if trial is None else (decides, trial)

    @contextmanager
    def timed(self, key: CaptureKey | None) -> Iterator[None]:
        """A call runs inside, by what `reason` says. key: None for a call that is not compared.

        Where the original finds too little memory, calls of its size class run compiled from then on.
        """
        self._read(wait=key is not None)
        if key is None:
            yield
            return
        size = _size_of(key)
        known = self._known(key.device, size)
        is_original = self._reason(key.device, size) is not None
        is_settled = known is not None and _is_settled(known[1])
        watch = None if is_settled else self._stopwatch(torch.device(key.device))
        waited, eager = self._stats.waiting_seconds(), self._stats.counters.eager_calls
        try:
            yield
        except Exception as error:
            if is_original and is_out_of_memory(error):
                self._without_memory.add((key.device, size.size_class))
            raise
        if watch is None:
            return
        watch.stop()
        if is_original or self._stats.counters.eager_calls == eager:  # else the original ran in place of compiled code
            way = ORIGINAL if is_original else COMPILED
            self._run = _Run(key.device, size, way, watch, self._stats.waiting_seconds() - waited)

    def _read(self, wait: bool) -> None:
        """Take over the time of the latest run, if the device has finished it. wait: for that."""
        run = self._run
        seconds = None if run is None else run.watch.seconds(wait)
        if run is None or seconds is None:
            return
        self._run = None
        if seconds <= 0 or not prod(run.size.shape) or run.waited > _WAITED * seconds:
            return
        trial = (self._tuner.get(run.device, run.size) or Trial()).with_run(run.way, seconds)
        self._tuner.set(run.device, run.size, trial)
        if _is_settled(trial):
            self._settle(run.device, run.size, trial)

    def _settle(self, device: str, size: Size, trial: Trial) -> None:
        """Let a size decide for its class; what other sizes of it have measured so far is not needed any more."""
        self._settled.pop(device, None)
        for other, _ in self._tuner.on(device):
            if other != size and other.size_class == size.size_class:
                self._tuner.remove(device, other)
        if _runs_original(trial):
            logger.info("Resolute: %s", _left_alone(size, trial).detail)

    def measure_again(self) -> None:
        """Compare every call again, whatever this process or an earlier one found. From any thread, between calls."""
        self._run = None
        self._settled.clear()
        self._without_memory.clear()
        self._tuner.clear()

    def report(self) -> list[dict[str, Any]]:
        """Each comparison, as JSON. seconds, original_seconds: for `shape`, 0 before a first run."""
        return [
            {
                "device": device, "model": size.model, "role": size.role, "shape": list(size.shape),
                "seconds": trial.seconds.get(COMPILED, 0.0), "original_seconds": trial.seconds.get(ORIGINAL, 0.0),
                "is_settled": _is_settled(trial), "is_left_alone": _is_settled(trial) and _runs_original(trial),
            }
            for device, size, trial in self._tuner
        ]  # fmt: skip


def _size_of(key: CaptureKey) -> Size:
    graph = key.graph
    return Size(_size_class(key), graph.signature.latent_shape, graph.model[:12], graph.role.value)


def _size_class(key: CaptureKey) -> str:
    """Key of a size class: model, role, dtype, numel rounded down to a power of two."""
    graph = key.graph
    latent = graph.signature.tensors[0][1]
    is_video = len(latent.shape) == 5 and latent.shape[2] > 1
    kind = (graph.model, graph.role.value, graph.backend, latent.dtype, is_video, key.torch_flags)
    return digest((*kind, prod(latent.shape).bit_length()))


def _left_alone(size: Size, trial: Trial) -> BypassReason:
    compiled, original = trial.seconds[COMPILED], trial.seconds[ORIGINAL]
    what = f"{size.role} of {'x'.join(map(str, size.shape))}"
    detail = f"{what} takes {compiled:.3g} s compiled and {original:.3g} s as it is on this device: it is left alone"
    return BypassReason(BypassCode.NOT_FASTER, detail)
