"""The seconds of earlier compiles, and what is left by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compile_cache.choices import compile_seconds
from compile_cache.choices.compile_seconds import START, CompileSeconds
from scripts.places import ROOT


def test_what_is_left_is_the_sum_of_what_was_measured_here() -> None:
    took = CompileSeconds(None, "cpu")
    took.add("ResBlock", 4.0)
    took.add("Attention", 6.0)
    took.add(START, 20.0)
    assert took.left(["ResBlock", "ResBlock", "Attention"], is_first=False) == (14.0, False)
    assert took.left(["Attention"], is_first=True) == (26.0, False)


def test_a_kind_that_was_never_measured_takes_as_long_as_others() -> None:
    took = CompileSeconds(None, "cpu")
    rough, is_rough = took.left(["ResBlock", "Attention"], is_first=False)
    assert is_rough and 0 < rough < took.left(["ResBlock", "Attention"], is_first=True)[0]
    took.add(START, 3.0)
    assert took.left(["ResBlock", "Attention"], is_first=False) == (rough, True), "it says nothing of a region"
    took.add("ResBlock", 4.0)
    took.add("Norm", 6.0)
    assert took.left(["ResBlock", "Attention"], is_first=True) == (4.0 + 5.0 + 3.0, False)


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        ("cpu-first-prompts", 1),
        ("cpu-first-prompts-restart", 1),
        ("h100-first-prompts-sdxl-again", 4),
        ("h100-first-prompts-sdxl-free-6-compared", 4),
        ("h100-first-prompts-sdxl-free-8", 4),
        ("h100-first-prompts-sdxl-restart", 4),
    ],
)
def test_a_rough_estimate_is_that_of_the_raw_files(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_seconds, "_AT_ONCE", at_once)
    rows = json.loads((ROOT / "benchmarks" / "results" / f"2026-11-27-{name}.json").read_text("utf-8"))["rows"]
    (events,) = (row["events"] for row in rows if row.get("events"))
    traces, compiles = ([each for each in events if each["kind"] == kind] for kind in ("trace", "compile"))
    took = compiles[-1]["at"] - (traces[0]["at"] - traces[0]["seconds"])
    rough, is_rough = CompileSeconds(None, "new").left(["ResBlock"] * len(compiles), is_first=True)
    assert is_rough and took / 1.5 < rough < took * 1.5, (took, rough)


def test_a_new_measurement_moves_the_old_one() -> None:
    took = CompileSeconds(None, "cpu")
    took.add("ResBlock", 4.0)
    took.add("ResBlock", 14.0)
    assert took.of("ResBlock") == pytest.approx(7.0)


def test_they_are_kept_for_each_machine_when_they_are_saved(tmp_path: Path) -> None:
    here = CompileSeconds(tmp_path / "compiles", "NVIDIA H200")
    here.add("ResBlock", 4.0)
    assert CompileSeconds(tmp_path / "compiles", "NVIDIA H200").of("ResBlock") is None
    here.save()
    assert CompileSeconds(tmp_path / "compiles", "NVIDIA H200").of("ResBlock") == 4.0
    assert CompileSeconds(tmp_path / "compiles", "cpu").of("ResBlock") is None
