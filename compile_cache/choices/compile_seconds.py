"""Seconds that the compile of each kind of region took on this machine, for an estimate of what is left.

The seconds are those between two ends, so they are right however many processes compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from .tuner import Tuner

START = "start"  # what the first compile of a process takes longer than others of its kind
# Before anything was measured: seconds of a region, those before the first one begins, and how many compile at once.
# The first two are the middle of SDXL's eight files benchmarks/results/*-first-prompts*.json with compiles, on an H100
# and a CPU.
_REGION, _BEGIN, _AT_ONCE = 4.0, 18.0, min(max((os.cpu_count() or 1) - 2, 1), 8)
_NEW = 0.3  # weight of a new measurement: machines get busier, and less busy


class CompileSeconds:
    """folder: None keeps nothing on disk. machine: what compiles and for what, for people: a GPU's name."""

    def __init__(self, folder: Path | None, machine: str) -> None:
        self._machine = machine
        self._tuner = Tuner[str, float]("the seconds of compiles", str, float, folder, lambda name: (name,))
        self.save = self._tuner.save

    def of(self, kind: str) -> float | None:
        return self._tuner.get(self._machine, kind)

    def add(self, kind: str, seconds: float) -> None:
        """A compile of this kind took so long. `save` writes it."""
        known = self.of(kind)
        mean = seconds if known is None else (1 - _NEW) * known + _NEW * seconds
        self._tuner.set(self._machine, kind, mean, save=False)

    def left(self, kinds: Iterable[str], is_first: bool) -> tuple[float, bool]:
        """Seconds for compiles of these kinds, with the compiler's start if `is_first`, and whether they are rough:
        nothing was measured here yet. A kind that was not takes as long as others.
        """
        known = dict(self._tuner.on(self._machine))
        start = known.pop(START, _BEGIN) if is_first else 0.0
        known.pop(START, None)
        usual = fmean(known.values()) if known else _REGION / _AT_ONCE
        return start + sum(known.get(kind, usual) for kind in kinds), not known
