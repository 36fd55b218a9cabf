"""The seconds of earlier compiles, and what is left by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_cache.store.compile_seconds import START, CompileSeconds


def test_what_is_left_is_the_sum_of_what_was_measured_here() -> None:
    took = CompileSeconds(None, "cpu")
    took.add("ResBlock", 4.0)
    took.add("Attention", 6.0)
    took.add(START, 20.0)
    assert took.left(["ResBlock", "ResBlock", "Attention"], is_first=False) == 14.0
    assert took.left(["Attention"], is_first=True) == 26.0


def test_a_kind_that_was_never_measured_has_no_estimate() -> None:
    took = CompileSeconds(None, "cpu")
    took.add("ResBlock", 4.0)
    assert took.left(["ResBlock", "Attention"], is_first=False) is None


def test_a_new_measurement_moves_the_old_one() -> None:
    took = CompileSeconds(None, "cpu")
    took.add("ResBlock", 4.0)
    took.add("ResBlock", 14.0)
    assert took.of("ResBlock") == pytest.approx(7.0)


def test_they_are_kept_for_each_machine(tmp_path: Path) -> None:
    path = tmp_path / "store" / "compile_seconds.json"
    here = CompileSeconds(path, "NVIDIA H200")
    here.add("ResBlock", 4.0)
    here.save()
    assert CompileSeconds(path, "NVIDIA H200").of("ResBlock") == 4.0
    assert CompileSeconds(path, "cpu").of("ResBlock") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"cpu": [1]}', '{"cpu": {"ResBlock": "x"}}', '{"cpu": {"R": NaN}}'])
def test_a_damaged_file_costs_only_the_estimate(tmp_path: Path, text: str) -> None:
    path = tmp_path / "compile_seconds.json"
    path.write_text(text, "utf-8")
    took = CompileSeconds(path, "cpu")
    assert took.of("ResBlock") is None
    took.add("ResBlock", 1.0)
    took.save()
    assert CompileSeconds(path, "cpu").of("ResBlock") == 1.0


def test_a_folder_that_refuses_costs_only_the_estimate(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    took = CompileSeconds(tmp_path / "file" / "compile_seconds.json", "cpu")
    took.add("ResBlock", 1.0)
    took.save()
