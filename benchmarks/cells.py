"""The cells of a benchmark: skip the cells that its file has already, and measure others while the time lasts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from scripts.errors import PromptError, ServerError

from . import rig

NO_LIMIT = 1e9  # seconds
PARTS = "lacks"  # of a row: the parts that are not measured yet

Row = dict[str, Any]


class OutOfTimeError(Exception):
    """The time ran out within a cell, so the cell is not measured."""


def add_options(parser: argparse.ArgumentParser, seconds: float = NO_LIMIT, cpu: str = "") -> None:
    """Add the options that all benchmarks of a server share. cpu: the models of `--cpu`; empty for no `--cpu`."""
    parser.add_argument("--out", type=Path, help="the results; a later run with this file measures what it lacks")
    parser.add_argument("--seconds", type=float, default=seconds, help="begin nothing that would end later")
    parser.add_argument("--folder", type=Path, help="keeps servers' folders, with compiled regions and logs")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    if cpu:
        parser.add_argument("--cpu", action="store_true", help=f"{cpu} on the CPU, to check this script")


class Cells:
    """The rows of a run, one per cell, in the file of `--out`.

    before: the other content of the file. rows: the rows of earlier runs and of this one.
    """

    def __init__(self, options: argparse.Namespace, key: Callable[[dict[str, Any]], Hashable]) -> None:
        """key: returns the cell of a row. Raises ValueError if the file is not a benchmark's result."""
        self._out: Path | None = options.out
        self._key = key
        self.deadline = time.monotonic() + options.seconds
        self._longest = 0.0
        self.about: dict[str, Any] = {}
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}
        self.before: dict[str, Any] = {}
        if self._out is not None and self._out.is_file():
            try:
                self.before = json.loads(self._out.read_text("utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{self._out} is no result of a benchmark: {error}") from error
        self.rows: list[dict[str, Any]] = self.before.pop("rows", [])

    def find(self, key: Hashable) -> dict[str, Any] | None:
        """The row of a cell; None if it was not measured."""
        return next((row for row in self.rows if self._key(row) == key), None)

    def lacks(self, key: Hashable) -> bool:
        """True if a cell is still to be measured: it has no row, failed, or lacks parts."""
        row = self.find(key)
        return row is None or "failed" in row or bool(row.get(PARTS))

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def measure(self, name: str, measure: Callable[[], Row], guess: float = 0.0) -> Row | None:
        """Measure a cell and write its row. Returns None and adds the name to `skipped` if less time is left than this
        run's longest cell took, or than `guess` seconds before the first one. Returns None and adds the reason to
        `failed` if a prompt or its server failed. Rows that `measure` added before that stay in the file.
        """
        if self.seconds_left < (self._longest or guess):
            return self.skip(name)
        started = time.monotonic()
        try:
            row = measure()
            self.add(row)
        except OutOfTimeError:
            return self.skip(name)
        except (PromptError, ServerError) as error:  # the other cells still count
            self.failed[name] = str(error)[:2000]
            print(f"{name}: {error}", flush=True)
            self.save()
            return None
        self._longest = max(self._longest, time.monotonic() - started)
        return row

    def skip(self, name: str) -> None:
        """Record and print that there was no time for a cell."""
        self.skipped.append(name)
        print(f"{name}: left out, {max(self.seconds_left, 0):.0f} s are left", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, or replace the older row of its cell, and write the file."""
        key = self._key(row)
        row |= {name: self.about[name] for name in ("date", "gpu") if name in self.about}
        places = [place for place, each in enumerate(self.rows) if self._key(each) == key]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self.save()

    def save(self, **more: Any) -> None:
        """Write the file. more: entries beside the rows, also for later writes."""
        self.about |= more
        rig.save(
            self._out, {**self.before, **self.about, "left": self.skipped, "failed": self.failed, "rows": self.rows}
        )
