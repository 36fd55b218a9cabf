"""README's table is that of the newest smoke run on a GPU, in which every check passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.smoke_checks import BEGIN, END, PASS, README, checks_of, newest, readme, write_readme

from .documentation import RESULTS


def test_the_newest_smoke_run_passed_and_names_its_code() -> None:
    result = json.loads(newest(RESULTS).read_text("utf-8"))
    assert [check for check in checks_of(result) if check.verdict != PASS] == []
    assert result["commit"] != "unknown"


def test_readme_has_the_table_of_the_newest_smoke_run() -> None:
    """After a run: `python -m benchmarks.smoke --readme benchmarks/results/FILE.json` writes the table."""
    file = newest(RESULTS)
    expected = f"{BEGIN}\n\n{readme(json.loads(file.read_text('utf-8')), file.name)}\n\n{END}"
    assert expected in README.read_text("utf-8"), f"README lacks the table of {file.name}:\n{expected}"


def result(folder: Path, name: str, date: str, is_cpu: bool = False) -> Path:
    names = ("region_compiles", "captures", "replays", "graph_calls", "eager_calls", "stall_seconds")
    counters = dict.fromkeys(names, 0) | {"bypasses": {}}
    prompts = [{"seconds": seconds, "counters": counters} for seconds in (1.0, 0.6, 1.5)]
    row = {"row": "SDXL 96x96", "kind": "size", "counts": [1, 1, 4], "resolute": {"prompts": prompts}}
    row |= {"model": "SDXL", "size": [96, 96, 1], "decodes": 1, "new": 1, "most": 2}
    row["stock"] = {"prompts": [{"seconds": 2 * each["seconds"]} for each in prompts]}
    about = {"date": date, "gpu": "NVIDIA X, 1, 2", "commit": "0123456789abc", "is_cpu": is_cpu}
    file = folder / name
    file.write_text(json.dumps({**about, "rows": [row]}), "utf-8")
    return file


def test_the_newest_is_told_by_its_date_and_ran_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no result of a smoke run"):
        newest(tmp_path)
    result(tmp_path, "z-smoke.json", "2026-11-24T10:00:00+00:00")
    last = result(tmp_path, "a-smoke.json", "2026-11-25T09:00:00+00:00")
    result(tmp_path, "cpu-smoke.json", "2026-11-26T09:00:00+00:00", is_cpu=True)
    (tmp_path / "2026-11-27-tour.json").write_text("{}", "utf-8")
    assert newest(tmp_path) == last


def test_the_command_writes_the_table_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n\n{BEGIN}\nold figures\n{END}\n\nafter\n", "utf-8")
    for name in ("one-smoke.json", "two-smoke.json"):
        write_readme(result(tmp_path, name, "2026-11-25"), page)
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n\n{BEGIN}\n\n| seconds | stock | Resolute |")
    assert text.endswith(f"\n\n{END}\n\nafter\n")
    assert "| SDXL 96x96 | 3.00 | 1.50 | 2.0 x | 0.8 | 0.4 |" in text
    assert "old figures" not in text
    assert "checks did not pass:\n\n- SDXL 96x96: " in text
    assert text.count("two-smoke.json") == 1
    assert "one-smoke" not in text
