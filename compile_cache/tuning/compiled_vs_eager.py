"""Choose compiled or eager for whole calls, by timing the calls of prompts on the device that runs them.

A region may be faster by itself and yet slow its module down: it returns its result in another layout, which the next
operation copies. And a GPU may be faster with torch's own kernels. So whole calls are compared, and from then on a size
class runs the faster way. Nothing runs twice, and no call needs more memory than one of the two ways alone.

If either way may be faster, calls run compiled and eager in turn. Other calls are compared in passing: originals run
while their code is being compiled, and compiled code follows them.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import BypassCode, BypassReason
from ..keys import CaptureKey, digest
from ..telemetry.stats import Stats
from ..torch_compat.out_of_memory import is_out_of_memory
from .machine import machine_of
from .stopwatch import Stopwatch, stopwatch_on
from .tuner import Trial, Tuner

logger = logging.getLogger(__name__)

# The number of timed runs of a way. The fastest counts: a first one may load kernels, and another program may keep the
# GPU busy. Runs that are timed in passing cost nothing, so more of them count.
_RUNS_IN_TURN = 2
_LEAST_ORIGINALS, _MOST_ORIGINALS, _COMPILED = 4, 16, 12
_VERSION = "2"  # of the stored form of comparisons
_MAX_SLOWDOWN = 1.02  # of the original's seconds: a call that is compared in passing stays compiled up to that
_MOST_RUNS = 16  # runs whose times are pending on the device
_WAITED = 0.02  # a call that spent a larger share on compiling, loading or capturing is not timed

_BEING_COMPARED = BypassReason(
    BypassCode.NOT_FASTER, "this call runs eagerly, to measure whether compiled code is faster on this device"
)
COMPILED, ORIGINAL = "compiled", "original"


@dataclass(frozen=True)
class Size:
    """The key of a comparison. size_class: see `_size_class`. graph: a digest of its calls' graph key. model, role: for
    users. shape: of the latent. in_turn: True if calls run both ways in turn, False if they are compared in passing.

    Times of two graphs are not compared: a larger latent may take less time per element, and a ControlNet's residuals
    take time too.
    """

    size_class: str
    graph: str
    shape: tuple[int, ...]
    model: str
    role: str
    in_turn: bool

    def takes(self, trial: Trial, way: str) -> bool:
        """True if one more run of a way counts. In passing, compiled runs count once enough originals were timed."""
        runs = trial.runs.get(way, 0)
        if self.in_turn:
            return runs < _RUNS_IN_TURN
        return runs < _MOST_ORIGINALS if way == ORIGINAL else self.has_originals(trial) and runs < _COMPILED

    def has_originals(self, trial: Trial) -> bool:
        return trial.runs.get(ORIGINAL, 0) >= (_RUNS_IN_TURN if self.in_turn else _LEAST_ORIGINALS)

    def is_settled(self, trial: Trial) -> bool:
        return self.has_originals(trial) and not self.takes(trial, COMPILED)

    def runs_original(self, trial: Trial) -> bool:
        """True if the next call runs eagerly. In turn, compiled calls are timed first, and must be faster."""
        if self.is_settled(trial):
            compiled, original = trial.seconds[COMPILED], trial.seconds[ORIGINAL]
            return compiled >= original if self.in_turn else compiled > _MAX_SLOWDOWN * original
        return self.in_turn and trial.runs.get(COMPILED, 0) > trial.runs.get(ORIGINAL, 0)


class _Run(NamedTuple):
    """A timed call. waited: its seconds of compiling, loading or capturing."""

    device: str
    size: Size
    way: str
    watch: Stopwatch
    waited: float


class CompiledVsEager:
    """Chooses between compiled code and the original for whole calls. GraphCache's lock guards it."""

    def __init__(
        self,
        stats: Stats,
        folder: Path | None = None,
        source: str = "",
        stopwatch: Callable[[torch.device], Stopwatch | None] = stopwatch_on,
    ) -> None:
        """folder: None keeps nothing on disk. source: names the code that models run. stopwatch: returns None for
        a device where calls are not compared: compiled code gains nothing on a CPU.
        """
        self._stats, self._stopwatch = stats, stopwatch
        self._tuner = Tuner[Size, Trial](
            "comparisons of compiled calls", Size, Trial, folder, lambda device: (*machine_of(device), source, _VERSION)
        )
        self._settled: dict[str, dict[str, Size]] = {}  # by device and size class: the size that decides
        self._without_memory: set[tuple[str, str]] = set()  # (device, size class) whose originals ran out of memory
        self._runs: deque[_Run] = deque(maxlen=_MOST_RUNS)  # runs that the device may not have finished yet
        self._latest: dict[int, tuple[str, Size]] = {}  # by owner: the device and size of the module's latest call
        self._replayed: str | None = None  # the way of the current call if it replays originals; "" if mixed

    def reason(self, key: CaptureKey, in_turn: bool, streamed: bool = False) -> BypassReason | None:
        """Return why a call runs eagerly; None if it runs compiled or lacks its code. streamed: see `CallPolicy`."""
        return self._reason(key.device, _size_of(key, in_turn, streamed))

    def _reason(self, device: str, size: Size) -> BypassReason | None:
        known = self._known(device, size)
        if known is None or not known[0].runs_original(known[1]) or (device, size.size_class) in self._without_memory:
            return None
        return _stays_eager(*known) if known[0].is_settled(known[1]) else _BEING_COMPARED

    def _known(self, device: str, size: Size) -> tuple[Size, Trial] | None:
        """Return the size that decides for `size`, the first settled one of its class or else itself, and its trial."""
        if device not in self._settled:
            entries = reversed(self._tuner.on(device))
            self._settled[device] = {each.size_class: each for each, trial in entries if each.is_settled(trial)}
        decides = self._settled[device].get(size.size_class, size)
        trial = self._tuner.get(device, decides)
        return None if trial is None else (decides, trial)

    @contextmanager
    def timed(self, key: CaptureKey | None, in_turn: bool, waits: bool, streamed: bool = False) -> Iterator[None]:
        """Time the call that runs inside, on the way that `reason` chooses. key: None for a call that is not compared.
        waits: its module's latest call ran originals whose code was being compiled. streamed: see `CallPolicy`.

        If the original runs out of memory, calls of its size class run compiled from then on.
        """
        if self._runs:
            self._read(wait=in_turn and key is not None)
        if key is None:
            yield
            return
        size = _size_of(key, in_turn, streamed)
        self._latest[key.owner] = key.device, size
        known = self._known(key.device, size)
        is_original = self._reason(key.device, size) is not None
        size_known, trial = known or (size, Trial())
        counts = in_turn or waits or size_known.has_originals(trial)
        watch = self._stopwatch(torch.device(key.device)) if counts and not size_known.is_settled(trial) else None
        before = () if watch is None else self._counted()
        self._replayed = None
        try:
            yield
        except Exception as error:
            if is_original and is_out_of_memory(error):
                self._without_memory.add((key.device, size.size_class))
            raise
        if watch is None:
            return
        watch.stop()
        waited, *risen = [now - then for now, then in zip(self._counted(), before, strict=True)]
        way = ORIGINAL if is_original else _way_of(risen) if self._replayed is None else self._replayed
        if way and size.takes(trial, way):
            self._runs.append(_Run(key.device, size, way, watch, waited))

    def replays_originals(self, is_mixed: bool) -> None:
        """The call inside `timed` replays a first-tier capture. is_mixed: compiled code runs in it too."""
        self._replayed = "" if is_mixed else ORIGINAL

    def replays_nothing(self) -> None:
        """The replay's output is dropped, and the call is answered again."""
        self._replayed = None

    def _counted(self) -> tuple[float, ...]:
        """Return all values that a call may increase: the seconds waited, and the counters for `_way_of`."""
        counters = self._stats.counters
        return self._stats.waiting_seconds(), counters.eager_calls, counters.waiting_calls, counters.region_calls

    def _read(self, wait: bool) -> None:
        """Record the times of the runs that the device has finished. wait: wait for all runs."""
        runs = self._runs  # another thread may replace it by an empty one
        while runs and (seconds := runs[0].watch.seconds(wait)) is not None:
            run = runs.popleft()
            if seconds > 0 and 0 not in run.size.shape and run.waited <= _WAITED * seconds:
                self._take(run, seconds)

    def _take(self, run: _Run, seconds: float) -> None:
        trial = self._tuner.get(run.device, run.size) or Trial()
        if not run.size.takes(trial, run.way):
            return
        before, trial = trial, trial.with_run(run.way, seconds)
        is_settled = run.size.is_settled(trial)
        is_news = run.size.has_originals(trial) and not run.size.has_originals(before)
        self._tuner.set(run.device, run.size, trial, save=run.size.in_turn or is_settled or is_news)
        if is_settled:
            self._settle(run.device, run.size, trial)

    def _settle(self, device: str, size: Size, trial: Trial) -> None:
        """Let a size decide for its class, and drop the measurements of the class's other sizes."""
        self._settled.pop(device, None)
        for other, _ in self._tuner.on(device):
            if other != size and other.size_class == size.size_class:
                self._tuner.remove(device, other)
        if size.runs_original(trial):
            logger.info("Resolute: %s", _stays_eager(size, trial).detail)

    def times_of(self, owner: int) -> tuple[float, float] | None:
        """Return the seconds of a module's latest call, compiled and eager, or None unless both were timed."""
        trial = self._tuner.get(*self._latest[owner]) if owner in self._latest else None
        seconds = {} if trial is None else trial.seconds
        return (seconds[COMPILED], seconds[ORIGINAL]) if {COMPILED, ORIGINAL} <= seconds.keys() else None

    def forget(self, owner: int) -> None:
        """Forget a module that was garbage collected."""
        self._latest.pop(owner, None)

    def measure_again(self) -> None:
        """Discard the comparisons of this and earlier processes, so that every call is compared again.

        Any thread may call it, between calls. Times of originals in passing stay: none run once the code is ready.
        """
        self._runs = deque(maxlen=_MOST_RUNS)
        self._settled.clear()
        self._without_memory.clear()
        known = [(device, size, trial) for device, size, trial in self._tuner if not size.in_turn]
        self._tuner.clear()
        for device, size, trial in known:
            if ORIGINAL in trial.runs:
                originals = {ORIGINAL: trial.seconds[ORIGINAL]}, {ORIGINAL: trial.runs[ORIGINAL]}
                self._tuner.set(device, size, Trial(*originals))

    def report(self) -> list[dict[str, Any]]:
        """Return each comparison, as JSON. seconds, original_seconds: for `shape`, 0 before the first run."""
        return [
            {
                "device": device, "model": size.model, "role": size.role, "shape": list(size.shape),
                "seconds": trial.seconds.get(COMPILED, 0.0), "original_seconds": trial.seconds.get(ORIGINAL, 0.0),
                "is_settled": size.is_settled(trial),
                "is_left_alone": size.is_settled(trial) and size.runs_original(trial),
            }
            for device, size, trial in self._tuner
        ]  # fmt: skip


def _way_of(risen: Sequence[float]) -> str:
    """Return the way that a call ran, from the increase of `_counted`'s counters. Empty for a mixture of both."""
    eager, waiting, regions = risen
    if not eager:
        return COMPILED
    return ORIGINAL if waiting and not regions else ""  # eager without a wait: fell back from compiled code


@functools.lru_cache(maxsize=1024)
def _size_of(key: CaptureKey, in_turn: bool, streamed: bool) -> Size:
    graph = key.graph
    shape = graph.signature.latent_shape
    # A step is not timed while weights stream, so the comparison with all weights resident decides for it.
    return Size(
        _size_class(key, in_turn and streamed), graph.digest()[:12], shape, graph.model[:12], graph.role.value, in_turn
    )


def _size_class(key: CaptureKey, streamed: bool) -> str:
    """Return the key of a size class: model, role, dtype, numel rounded down to a power of two, streamed weights."""
    graph = key.graph
    latent = graph.signature.tensors[0][1]
    is_video = len(latent.shape) == 5 and latent.shape[2] > 1
    kind = (graph.model, graph.role.value, graph.backend, latent.dtype, is_video, key.torch_flags)
    return digest((*kind, prod(latent.shape).bit_length(), *(("streamed",) if streamed else ())))


def _stays_eager(size: Size, trial: Trial) -> BypassReason:
    compiled, original = trial.seconds[COMPILED], trial.seconds[ORIGINAL]
    what = f"{size.role} of {'x'.join(map(str, size.shape))}"
    detail = f"{what} takes {compiled:.3g} s compiled and {original:.3g} s as it is on this device: it is left alone"
    return BypassReason(BypassCode.NOT_FASTER, detail)
