"""The soak benchmark: its random visits and its summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from scripts.setup.command import Setup

from ...comfy.random_visits import trace
from .machine import Machine


def rows(count: int = 40, **changes: Any) -> list[dict[str, Any]]:
    plain = {"kind": "sdxl", "region_compiles": 0, "captures": 1, "evictions": 0, "device_mib": 9000, "host_mib": 4000}
    return [{**plain, **{name: change(number) for name, change in changes.items()}} for number in range(count)]


def test_a_trace_is_the_same_each_time_and_visits_both_models_and_many_shapes() -> None:
    visits = list(trace(500, ["sdxl", "sd15"], range(512, 1281, 64)))
    assert visits == list(trace(500, ["sdxl", "sd15"], range(512, 1281, 64)))
    assert {visit.kind for visit in visits} == {"sdxl", "sd15"}
    assert len({(visit.kind, visit.width, visit.height, visit.batch) for visit in visits}) > 40
    assert len({visit.seed for visit in visits}) == 500
    assert {visit.lora for visit in visits} == {"", "a", "b"}


def test_the_slope_is_that_of_the_second_half_with_its_spread() -> None:
    found = soak.summary(rows(device_mib=lambda n: 5000 + max(n, 20), host_mib=lambda n: 4000 + 5 * (n % 2)), [0])
    assert found["device_mib_per_100_prompts"] == {"slope": 100.0, "standard_error": 0.0}
    host = found["host_mib_per_100_prompts"]
    assert abs(host["slope"]) < 3 * host["standard_error"]


def test_a_change_of_the_checkpoint_is_no_slope() -> None:
    kinds = {"kind": lambda n: "sdxl" if n < 27 else "sd15"}
    flat = soak.summary(rows(**kinds, device_mib=lambda n: 9000 if n < 27 else 4000), [])
    assert flat["device_mib_per_100_prompts"] == {"slope": 0.0, "standard_error": 0.0}
    rises = soak.summary(rows(**kinds, device_mib=lambda n: (9000 if n < 27 else 4000) + 2 * n), [])
    assert rises["device_mib_per_100_prompts"] == {"slope": 200.0, "standard_error": 0.0}


def test_a_compile_counts_unless_it_is_the_first_of_its_model() -> None:
    assert soak.summary(rows(region_compiles=lambda n: int(n in (0, 7))), [0, 7])["compiles_after_the_first"] == 0
    assert soak.summary(rows(region_compiles=lambda n: int(n in (0, 7))), [0])["compiles_after_the_first"] == 1


def test_the_worst_error_is_of_the_compared_prompts() -> None:
    some = rows()
    assert soak.summary(some, [])["worst_error"] is None
    some[3]["error"], some[9]["error"] = 1e-3, 2e-3
    found = soak.summary(some, [])
    assert (found["compared"], found["worst_error"]) == (2, 2e-3)


def test_a_soak_goes_on_after_a_prompt_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.counted["evictions"] = 0
    monkeypatch.setattr(soak.rig, "server", machine.server)
    monkeypatch.setattr(soak.rig, "environment", lambda server: {"gpu": "a GPU"})
    monkeypatch.setattr(soak.command, "prepare", lambda: Setup(Path(sys.executable), {"0.33.0": tmp_path}))
    monkeypatch.setattr(soak.generated, "ensure", lambda kind, python, comfyui: tmp_path / kind)
    out = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--cpu", "--prompts", "8", "--every", "4", "--out", str(out)])
    machine.fails = f'"seed": {next(trace(8, ["sd15-mini"], range(64, 193, 64), 40)).seed},'
    soak.main()
    found = json.loads(out.read_text("utf-8"))
    assert machine.asked.count("stock") == 2
    assert [each["failed"].splitlines()[0] for each in found["errors"]] == [f"{machine.fails} failed"]
    assert (len(found["rows"]), found["summary"]["prompts"], found["summary"]["worst_error"]) == (7, 7, 0.0)
