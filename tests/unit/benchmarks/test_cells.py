"""A benchmark begins no cell that cannot fit, writes after each, and goes on with what its file lacks. A soak has a
summary, and survives a prompt that fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cells as cells_of
from benchmarks import rig, soak
from benchmarks.cells import PARTS, Cells

from ...comfy.random_visits import trace
from .machine import Machine


def begin(out: Path) -> Cells:
    return Cells(argparse.Namespace(out=out, seconds=60.0), lambda row: row["size"])


def test_a_cell_needs_the_time_of_the_longest_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Machine(), tmp_path / "out.json"
    monkeypatch.setattr(cells_of, "time", clock)
    cells = begin(out)
    assert cells.measure("a", lambda: clock.sleep(40) or {"size": 1}, 50) == {"size": 1}
    assert cells.measure("b", lambda: {"size": 2}) is None
    assert cells.skipped == ["b"]
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


def test_the_rise_of_the_counters_names_only_bypasses_that_rose() -> None:
    before = {"replays": 3, "stall_seconds": 1.5, "bypasses": {"known": 2, "gone": 1}}
    after = {"replays": 7, "stall_seconds": 2.0, "bypasses": {"known": 2, "gone": 1, "new": 4}}
    assert rig.rise(before, after) == {"replays": 4, "stall_seconds": 0.5, "bypasses": {"new": 4}}


def rows(**changes: Any) -> list[dict[str, Any]]:
    plain = {"kind": "sdxl", "region_compiles": 0, "captures": 1, "evictions": 0, "device_mib": 9000, "host_mib": 4000}
    return [{**plain, **{name: change(number) for name, change in changes.items()}} for number in range(40)]


def test_the_slope_is_that_of_the_second_half_and_not_a_change_of_the_checkpoint() -> None:
    changes = {"device_mib": lambda n: 5000 + max(n, 20), "host_mib": lambda n: 4000 + 5 * (n % 2)}
    found = soak.summary(rows(**changes, region_compiles=lambda n: int(n in (0, 7))), [0])
    assert found["compiles_after_the_first"] == 1
    assert found["device_mib_per_100_prompts"] == {"slope": 100.0, "standard_error": 0.0}
    assert abs(found["host_mib_per_100_prompts"]["slope"]) < 3 * found["host_mib_per_100_prompts"]["standard_error"]
    changes = {"device_mib": lambda n: 9000 + 2 * n - 5000 * (n > 26), "kind": lambda n: f"{n > 26}"}
    assert soak.summary(rows(**changes), [])["device_mib_per_100_prompts"]["slope"] == 200.0


def test_a_soak_goes_on_after_a_prompt_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine().serve(monkeypatch, soak)
    monkeypatch.setattr(soak.generated, "ensure", lambda kind, python, comfyui: tmp_path / kind)
    out = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--cpu", "--prompts", "8", "--every", "4", "--out", str(out)])
    machine.fails = f'"seed": {next(trace(8, ["sd15-mini"], range(64, 193, 64), 40)).seed},'
    soak.main()
    found = json.loads(out.read_text("utf-8"))
    assert machine.asked.count("stock") == 2
    assert [each["failed"].splitlines()[0] for each in found["errors"]] == [f"{machine.fails} failed"]
    assert (len(found["rows"]), found["summary"]["prompts"], found["summary"]["worst_error"]) == (7, 7, 0.0)
