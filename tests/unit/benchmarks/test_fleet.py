"""The benchmark of a fleet measures each router once, and goes on after one that failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks.cells import OutOfTimeError
from scripts.errors import ServerError


def row(router: str) -> dict[str, Any]:
    numbers = ("replicas", "prompts", "share_warm", "p50", "p95", "prompts_per_minute", "stall_seconds")
    return {"router": router, "seconds": [1.0], **dict.fromkeys(numbers, 1)}


def test_a_later_run_measures_the_routers_that_the_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    broken = {"default"}

    def measure(options: Any, folder: Path, router: str, store: Path, limit: float) -> dict[str, Any]:
        measured.append(router)
        assert list(folder.iterdir()) == []
        (folder / "log").touch()
        if router in broken:
            raise ServerError("The fleet did not start")
        return row(router)

    monkeypatch.setattr(fleet, "measure", measure)
    monkeypatch.setattr(fleet, "prepare", lambda options, folder: folder / "store")
    out = tmp_path / "fleet.json"
    monkeypatch.setattr(sys, "argv", ["fleet", "--cpu", "--out", str(out), "--folder", str(tmp_path / "fleets")])
    assert fleet.main() == 1
    assert json.loads(out.read_text("utf-8"))["failed"] == {"default": "The fleet did not start"}
    broken.clear()
    assert fleet.main() == 0
    assert measured == [*fleet.ROUTERS, "default"]
    found = json.loads(out.read_text("utf-8"))
    assert {each["router"] for each in found["rows"]} == set(fleet.ROUTERS)
    assert found["failed"] == {}


def test_a_trace_has_every_checkpoint_and_two_of_them_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", "--out", "x"])
    options = fleet.parse()
    names = [nodes["load"]["inputs"]["ckpt_name"] for nodes in fleet.trace(options)]
    assert (len(names), set(names)) == (200, {f"fleet-{number}.safetensors" for number in range(4)})
    least, most = (count * fleet.CHECKPOINT_GIB + 2 * fleet.WORK_GIB for count in (2, 3))
    free = fleet.free_gib(options)
    assert free is not None
    assert least <= free < most
    monkeypatch.setattr(sys, "argv", ["fleet", "--out", "x", "--cpu"])
    options = fleet.parse()
    models = {json.dumps(nodes["load"]["inputs"]) for nodes in fleet.trace(options)}
    assert (len(models), fleet.free_gib(options)) == (4, None)


class Idle:
    """A fleet that came up too late."""

    client = SimpleNamespace(get=lambda path: {"prompts": []})

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: Any) -> None: ...


def test_a_fleet_that_got_no_prompt_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", "--out", "x", "--cpu"])
    monkeypatch.setattr(fleet, "Fleet", Idle)
    with pytest.raises(OutOfTimeError):
        fleet.measure(fleet.parse(), tmp_path, "warm", tmp_path, 0.0)
