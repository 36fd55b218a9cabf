"""A benchmark begins no cell that cannot fit, writes after each, and goes on with what its file lacks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cells as cells_of
from benchmarks import rig
from benchmarks.cells import PARTS, Cells, OutOfTimeError
from scripts.errors import ServerError

from .machine import Machine


def begin(out: Path) -> Cells:
    return Cells(argparse.Namespace(out=out, seconds=60.0), lambda row: row["size"])


def test_a_cell_needs_the_time_of_the_longest_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Machine(), tmp_path / "out.json"
    monkeypatch.setattr(cells_of, "time", clock)
    cells = begin(out)
    assert cells.measure("a", lambda: clock.sleep(40) or {"size": 1}, 50) == {"size": 1}
    assert cells.measure("b", lambda: {"size": 2}) is None
    assert cells.left == ["b"]
    assert begin(out).measure("c", lambda: {"size": 3}, 61) is None
    out.write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"out\.json is no result"):  # it is not written over
        begin(out)


def test_a_later_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    first = begin(out)
    first.about["date"] = "today"
    for number, row in enumerate(({"ms": 3}, {"failed": "it broke"}, {PARTS: ["stock"]})):
        first.measure("a cell", lambda row=row, number=number: {"size": number, **row})
    first.save(events=[1])
    second = begin(out)
    assert [second.lacks(size) for size in range(4)] == [False, True, True, True]
    second.about["date"] = "tomorrow"
    second.measure("b", lambda: {"size": 1, "ms": 4})
    found = json.loads(out.read_text("utf-8"))
    assert [(row["date"], row.get("ms")) for row in found["rows"]] == [("today", 3), ("tomorrow", 4), ("today", None)]
    assert (found["events"], found["date"], found["left"]) == ([1], "tomorrow", [])


@pytest.mark.parametrize("error", [OutOfTimeError(), ServerError("ComfyUI ended")])
def test_a_cell_that_does_not_end_well_leaves_its_part_and_the_others(tmp_path: Path, error: Exception) -> None:
    cells = begin(tmp_path / "out.json")

    def measure() -> Any:
        cells.add({"size": 1, PARTS: ["stock"]})
        raise error

    assert cells.measure("a", measure) is None
    assert cells.measure("b", lambda: {"size": 2}) == {"size": 2}
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))
    of_time = isinstance(error, OutOfTimeError)
    assert (found["left"], found["failed"]) == ((["a"], {}) if of_time else ([], {"a": "ComfyUI ended"}))
    assert found["rows"] == [{"size": 1, PARTS: ["stock"]}, {"size": 2}]


def test_the_rise_of_the_counters_names_only_bypasses_that_rose() -> None:
    before = {"replays": 3, "stall_seconds": 1.5, "bypasses": {"known": 2, "gone": 1}}
    after = {"replays": 7, "stall_seconds": 2.0, "bypasses": {"known": 2, "gone": 1, "new": 4}}
    assert rig.rise(before, after) == {"replays": 4, "stall_seconds": 0.5, "bypasses": {"new": 4}}
