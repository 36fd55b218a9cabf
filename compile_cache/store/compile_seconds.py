"""Seconds that the compile of each kind of region took on this machine, for an estimate of what is left.

The seconds are those between two ends, so they are right however many processes compile.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path

from .private_files import make_private, write_file

logger = logging.getLogger(__name__)

START = "start"  # what the first compile of a process takes longer than others of its kind
_NEW = 0.3  # weight of a new measurement: machines get busier, and less busy


class CompileSeconds:
    """path: the file that keeps them, or None. machine: what compiles and for what, for people: a GPU's name."""

    def __init__(self, path: Path | None, machine: str) -> None:
        self._path, self._machine = path, machine
        self._all = _read(path)
        self._seconds = self._all.setdefault(machine, {})

    def add(self, kind: str, seconds: float) -> None:
        """A compile of this kind took so long."""
        known = self._seconds.get(kind)
        self._seconds[kind] = seconds if known is None else (1 - _NEW) * known + _NEW * seconds

    def of(self, kind: str) -> float | None:
        return self._seconds.get(kind)

    def left(self, kinds: Iterable[str], is_first: bool) -> float | None:
        """Seconds for compiles of these kinds, with the compiler's start if `is_first`; None if a kind was never
        measured here.
        """
        known = [self._seconds.get(kind) for kind in kinds]
        found = [seconds for seconds in known if seconds is not None]
        if len(found) < len(known):
            return None
        return sum(found) + (self._seconds.get(START, 0.0) if is_first else 0.0)

    def save(self) -> None:
        """Raises nothing: without the file there is no estimate after a restart."""
        if self._path is None:
            return
        try:
            make_private(self._path.parent)
            write_file(self._path, json.dumps(self._all).encode())
        except OSError as error:
            logger.debug("Resolute: the seconds of compiles are not kept: %s", error)


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """An empty dict for a file that is missing or damaged."""
    try:
        plain = json.loads(path.read_text("utf-8")) if path is not None else {}
        return {
            str(machine): {
                str(kind): float(s) for kind, s in kinds.items() if math.isfinite(float(s)) and float(s) >= 0
            }
            for machine, kinds in plain.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
