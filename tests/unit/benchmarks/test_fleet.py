"""The benchmark of a fleet measures each router once, and goes on after one that failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fleet
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
