"""Seconds that the compile of each kind of region took on this machine, for an estimate of what is left.

The seconds are those between two ends, so they are right however many processes compile.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .tuner import Tuner

START = "start"  # what the first compile of a process takes longer than others of its kind
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

    def left(self, kinds: Iterable[str], is_first: bool) -> float | None:
        """Seconds for compiles of these kinds, with the compiler's start if `is_first`; None if a kind was never
        measured here.
        """
        known = [self.of(kind) for kind in kinds]
        found = [seconds for seconds in known if seconds is not None]
        if len(found) < len(known):
            return None
        return sum(found) + (self.of(START) or 0.0 if is_first else 0.0)
