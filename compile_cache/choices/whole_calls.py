"""Which calls are faster as they are: measured on the device that runs them, by calls that come anyway.

A region may be faster by itself and its module slower with it: it gives its result in another layout, and what comes
after it copies that. And a card may be faster with torch's own kernels. So whole calls are compared, and from then on
a size class runs the faster way. Nothing runs twice, and no call needs more memory than one of the two ways alone.

Where it is not known beforehand which way is faster, calls run compiled and eager in turn. Others are compared as they
come: originals run while their code is being compiled, and compiled code follows them.
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
from ..stats import Stats
from ..torch_facts.out_of_memory import is_out_of_memory
from .machine import machine_of
from .stopwatch import Stopwatch, stopwatch_on
from .tuner import Trial, Tuner

logger = logging.getLogger(__name__)

# So many runs of a way are timed, and its fastest counts: a first one may load kernels, and another program may keep
# the GPU busy. Runs that come anyway cost nothing, so more of them count.
_RUNS_IN_TURN = 2
_LEAST_ORIGINALS, _MOST_ORIGINALS, _COMPILED = 4, 16, 12
_VERSION = "2"  # of the form in which comparisons are kept
_MOST_LOSS = 1.02  # of the original's seconds: a call that is compared as it comes stays compiled up to that
_MOST_RUNS = 16  # that wait for the device
_WAITED = 0.02  # a call of which a larger share went to compiling, loading or capturing is not timed

_BEING_COMPARED = BypassReason(
    BypassCode.NOT_FASTER, "this call runs eagerly, to measure whether compiled code is faster on this device"
)
COMPILED, ORIGINAL = "compiled", "original"


@dataclass(frozen=True)
class Size:
    """A key of a comparison. size_class: see `_size_class`. graph: a digest of the key of its calls. model, role: for
    people. shape: of the latent. in_turn: whether it runs both ways in turn, or is compared as it comes.

    Times of two graphs are not compared: a larger latent may take less for each element, and a ControlNet's residuals
    take time too.
    """

    size_class: str
    graph: str
    shape: tuple[int, ...]
    model: str
    role: str
    in_turn: bool

    def takes(self, trial: Trial, way: str) -> bool:
        """One more run of a way counts. Compiled ones that come count where they can be compared."""
        runs = trial.runs.get(way, 0)
        if self.in_turn:
            return runs < _RUNS_IN_TURN
        return runs < _MOST_ORIGINALS if way == ORIGINAL else self.has_originals(trial) and runs < _COMPILED

    def has_originals(self, trial: Trial) -> bool:
        return trial.runs.get(ORIGINAL, 0) >= (_RUNS_IN_TURN if self.in_turn else _LEAST_ORIGINALS)

    def is_settled(self, trial: Trial) -> bool:
        return self.has_originals(trial) and not self.takes(trial, COMPILED)

    def runs_original(self, trial: Trial) -> bool:
        """The next call runs eager. In turn, compiled ones are timed first, and have to be faster."""
        if self.is_settled(trial):
            compiled, original = trial.seconds[COMPILED], trial.seconds[ORIGINAL]
            return compiled >= original if self.in_turn else compiled > _MOST_LOSS * original
        return self.in_turn and trial.runs.get(COMPILED, 0) > trial.runs.get(ORIGINAL, 0)


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
        """folder: None keeps nothing on disk. source: names the code that models run. stopwatch: None for a
        device where calls are not compared: compiled code gains nothing on a CPU.
        """
        self._stats, self._stopwatch = stats, stopwatch
        self._tuner = Tuner[Size, Trial](
            "comparisons of compiled calls", Size, Trial, folder, lambda device: (*machine_of(device), source, _VERSION)
        )
        self._settled: dict[str, dict[str, Size]] = {}  # by device and size class: the size that decides
        self._without_memory: set[tuple[str, str]] = set()  # devices and size classes whose original found too little
        self._runs: deque[_Run] = deque(maxlen=_MOST_RUNS)  # that the device may not have finished yet
        self._latest: dict[int, tuple[str, Size]] = {}  # by owner of a module: its latest call
        self._replayed: str | None = None  # the way of the current call, if it replays originals

    def reason(self, key: CaptureKey, in_turn: bool, streamed: bool = False) -> BypassReason | None:
        """Why a call runs eager; None if it runs compiled, or waits for its code. streamed: see `Call.is_streamed`."""
        return self._reason(key.device, _size_of(key, in_turn, streamed))

    def _reason(self, device: str, size: Size) -> BypassReason | None:
        known = self._known(device, size)
        if known is None or not known[0].runs_original(known[1]) or (device, size.size_class) in self._without_memory:
            return None
        return _left_alone(*known) if known[0].is_settled(known[1]) else _BEING_COMPARED

    def _known(self, device: str, size: Size) -> tuple[Size, Trial] | None:
        """The size that decides for another one: the first of its class that is settled, or else itself."""
        if device not in self._settled:
            entries = reversed(self._tuner.on(device))
            self._settled[device] = {each.size_class: each for each, trial in entries if each.is_settled(trial)}
        decides = self._settled[device].get(size.size_class, size)
        trial = self._tuner.get(device, decides)
        return None if trial is None else (decides, trial)

    @contextmanager
    def timed(self, key: CaptureKey | None, in_turn: bool, waits: bool, streamed: bool = False) -> Iterator[None]:
        """A call runs inside, by what `reason` says. key: None for a call that is not compared. waits: its module's
        latest call ran originals whose code was coming. streamed: see `Call.is_streamed`.

        Where the original finds too little memory, calls of its size class run compiled from then on.
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
        """The call inside `timed` replays a capture of the first tier. is_mixed: compiled code runs in that too."""
        self._replayed = "" if is_mixed else ORIGINAL

    def replays_nothing(self) -> None:
        """That replay is dropped: the call is answered anew."""
        self._replayed = None

    def _counted(self) -> tuple[float, ...]:
        """Read all that a call may add to: the seconds waited, and the counters that `_way_of` takes."""
        counters = self._stats.counters
        return self._stats.waiting_seconds(), counters.eager_calls, counters.waiting_calls, counters.region_calls

    def _read(self, wait: bool) -> None:
        """Take over the times of the runs that the device has finished. wait: for all."""
        runs = self._runs  # another thread may put an empty one there
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
        """Let a size decide for its class; what other sizes of it have measured so far is not needed any more."""
        self._settled.pop(device, None)
        for other, _ in self._tuner.on(device):
            if other != size and other.size_class == size.size_class:
                self._tuner.remove(device, other)
        if size.runs_original(trial):
            logger.info("Resolute: %s", _left_alone(size, trial).detail)

    def times_of(self, owner: int) -> tuple[float, float] | None:
        """Seconds of a module's latest call, compiled and as it is, if calls that came anyway told both."""
        trial = self._tuner.get(*self._latest[owner]) if owner in self._latest else None
        seconds = {} if trial is None else trial.seconds
        return (seconds[COMPILED], seconds[ORIGINAL]) if {COMPILED, ORIGINAL} <= seconds.keys() else None

    def forget(self, owner: int) -> None:
        """A module was garbage collected."""
        self._latest.pop(owner, None)

    def measure_again(self) -> None:
        """Compare every call again, whatever this process or an earlier one found. From any thread, between calls.

        Times of originals that came stay: there are no others once the code is there.
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
        """Each comparison, as JSON. seconds, original_seconds: for `shape`, 0 before a first run."""
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
    """Which way a call ran, by how the counters of `_counted` rose. Empty for a mixture of both."""
    eager, waiting, regions = risen
    if not eager:
        return COMPILED
    return ORIGINAL if waiting and not regions else ""  # eager without a wait: in place of compiled code


@functools.lru_cache(maxsize=1024)
def _size_of(key: CaptureKey, in_turn: bool, streamed: bool) -> Size:
    graph = key.graph
    shape = graph.signature.latent_shape
    # A step is not timed while weights stream, so what was measured with all of them there decides for it.
    return Size(
        _size_class(key, in_turn and streamed), graph.digest()[:12], shape, graph.model[:12], graph.role.value, in_turn
    )


def _size_class(key: CaptureKey, streamed: bool) -> str:
    """Key of a size class: model, role, dtype, numel rounded down to a power of two, whether weights are streamed."""
    graph = key.graph
    latent = graph.signature.tensors[0][1]
    is_video = len(latent.shape) == 5 and latent.shape[2] > 1
    kind = (graph.model, graph.role.value, graph.backend, latent.dtype, is_video, key.torch_flags)
    return digest((*kind, prod(latent.shape).bit_length(), *(("streamed",) if streamed else ())))


def _left_alone(size: Size, trial: Trial) -> BypassReason:
    compiled, original = trial.seconds[COMPILED], trial.seconds[ORIGINAL]
    what = f"{size.role} of {'x'.join(map(str, size.shape))}"
    detail = f"{what} takes {compiled:.3g} s compiled and {original:.3g} s as it is on this device: it is left alone"
    return BypassReason(BypassCode.NOT_FASTER, detail)
