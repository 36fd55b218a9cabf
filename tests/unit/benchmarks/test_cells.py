"""A benchmark begins no cell that cannot fit, writes after each, and goes on with what its file lacks."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cells as cells_of
from benchmarks.cells import Cells, OutOfTimeError, parts
from scripts.errors import ServerError


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cells_of, "time", clock)
    return clock


def begin(out: Path, seconds: float = 60.0) -> Cells:
    return Cells(argparse.Namespace(out=out, seconds=seconds), lambda row: row["size"])


def taking(clock: Clock, seconds: float, **row: Any) -> Any:
    def measure() -> dict[str, Any]:
        clock.now += seconds
        return row

    return measure


def test_a_cell_needs_the_time_of_the_longest_so_far(tmp_path: Path, clock: Clock) -> None:
    cells = begin(tmp_path / "out.json")
    assert cells.measure("a", taking(clock, 40, size=1), 50) == {"size": 1}
    assert cells.measure("b", taking(clock, 1, size=2)) is None
    assert cells.left == ["b"]
    cells = begin(tmp_path / "out.json")
    assert cells.measure("c", taking(clock, 1, size=3), 61) is None


def test_a_later_run_goes_on(tmp_path: Path, clock: Clock) -> None:
    out = tmp_path / "out.json"
    first = begin(out)
    first.about |= {"date": "today", "gpu": "a GPU"}
    first.measure("a", taking(clock, 1, size=1, ms=3))
    first.save(events=[1])
    first.measure("b", taking(clock, 1, size=2, failed="it broke"))
    second = begin(out)
    assert [second.lacks(size) for size in (1, 2, 3)] == [False, True, True]
    second.about["date"] = "tomorrow"
    second.measure("b", taking(clock, 1, size=2, ms=4))
    found = json.loads(out.read_text("utf-8"))
    assert [(row["size"], row["ms"], row["date"]) for row in found["rows"]] == [(1, 3, "today"), (2, 4, "tomorrow")]
    assert (found["events"], found["date"], found["left"]) == ([1], "tomorrow", [])


@pytest.mark.parametrize("error", [OutOfTimeError(), ServerError("ComfyUI ended")])
def test_a_cell_that_does_not_end_well_leaves_the_others(tmp_path: Path, clock: Clock, error: Exception) -> None:
    cells = begin(tmp_path / "out.json")

    def measure() -> Any:
        raise error

    assert cells.measure("a", measure) is None
    assert cells.measure("b", taking(clock, 1, size=2)) == {"size": 2}
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))
    of_time = isinstance(error, OutOfTimeError)
    assert (found["left"], found["failed"]) == ((["a"], {}) if of_time else ([], {"a": "ComfyUI ended"}))


@pytest.mark.parametrize("error", [OutOfTimeError(), ServerError("ComfyUI ended"), KeyboardInterrupt()])
def test_a_cell_that_is_cut_leaves_its_part(tmp_path: Path, clock: Clock, error: BaseException) -> None:
    out = tmp_path / "out.json"

    def measure() -> Any:
        row: dict[str, Any] = {"size": 1}

        def add(contender: str) -> None:
            clock.now += 5
            if contender == "stock" and broken:
                raise error
            row[contender] = 7

        return parts(row, ("resolute", "stock"), add)

    broken = True
    cells = begin(out)
    with contextlib.suppress(KeyboardInterrupt):
        assert cells.measure("a", measure) is None
    assert [(row["resolute"], row["lacks"]) for row in json.loads(out.read_text("utf-8"))["rows"]] == [(7, ["stock"])]
    broken = False
    cells = begin(out)
    assert cells.lacks(1)
    assert cells.measure("a", measure) == {"size": 1, "resolute": 7, "stock": 7, "lacks": []}
    assert not begin(out).lacks(1)


def test_a_file_that_is_no_result_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"out\.json is no result"):
        begin(out)
