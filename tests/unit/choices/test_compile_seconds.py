"""The seconds of earlier compiles, and what is left by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_cache.choices.compile_seconds import START, CompileSeconds


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
