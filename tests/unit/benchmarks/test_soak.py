"""The soak benchmark: its summary, and a prompt that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak

from ...comfy.random_visits import trace
from .machine import Machine


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
