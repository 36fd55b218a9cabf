"""README's table is that of the newest smoke run on a GPU, in which every check passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.smoke_checks import BEGIN, END, PASS, README, checks_of, readme, write_readme

from .test_docs import RESULTS


def newest(folder: Path) -> Path:
    """The result of the last smoke run on a GPU. Raises FileNotFoundError if there is none."""
    found = {}
    for file in folder.glob("*smoke*.json"):
        result = json.loads(file.read_text("utf-8"))
        if not result["is_cpu"]:
            found[result["date"], file.name] = file
    if not found:
        raise FileNotFoundError(f"{folder} has no result of a smoke run: add that of benchmarks.smoke on a GPU")
    return found[max(found)]


def test_the_newest_smoke_run_passed_and_names_its_code() -> None:
    result = json.loads(newest(RESULTS).read_text("utf-8"))
    assert [check for check in checks_of(result) if check.verdict != PASS] == []
    assert result["commit"] != "unknown"


def test_readme_has_the_table_of_the_newest_smoke_run() -> None:
    """After a run: `python -m benchmarks.smoke --readme benchmarks/results/FILE.json` writes the table."""
    file = newest(RESULTS)
    expected = f"{BEGIN}\n\n{readme(json.loads(file.read_text('utf-8')), file.name)}\n\n{END}"
    assert expected in README.read_text("utf-8"), f"README lacks the table of {file.name}:\n{expected}"


def test_the_newest_is_told_by_its_date_and_ran_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no result of a smoke run"):
        newest(tmp_path)
    runs = {"z-smoke": ("2026-11-24", False), "a-smoke": ("2026-11-25", False), "cpu-smoke": ("2026-11-26", True)}
    for name, (date, is_cpu) in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "is_cpu": is_cpu}), "utf-8")
    assert newest(tmp_path).name == "a-smoke.json"


def test_the_command_writes_the_table_and_nothing_else(tmp_path: Path) -> None:
    page, file = tmp_path / "README.md", newest(RESULTS)
    page.write_text(f"before\n\n{BEGIN}\nold figures\n{END}\n\nafter\n", "utf-8")
    write_readme(file, page)
    write_readme(file, page)
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n\n{BEGIN}\n\n| ") and text.endswith(f"\n\n{END}\n\nafter\n")
    assert "old figures" not in text and text.count(file.name) == 1
