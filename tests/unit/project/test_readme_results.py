"""Figures of README and docs/measured.md are those of raw files, and a smoke run on a GPU passed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import charts
from benchmarks.smoke_checks import BEGIN, END, PAGE, PASS, checks_of, page_table, write_page

from .test_docs import RESULTS, ROOT

README = (ROOT / "README.md").read_text("utf-8")


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


def test_the_page_has_the_table_of_the_newest_smoke_run() -> None:
    """After a run: `python -m benchmarks.smoke --page benchmarks/results/FILE.json` writes the table."""
    file = newest(RESULTS)
    expected = f"{BEGIN}\n\n{page_table(json.loads(file.read_text('utf-8')), file.name)}\n\n{END}"
    assert expected in PAGE.read_text("utf-8"), f"{PAGE} lacks the table of {file.name}:\n{expected}"


def test_the_newest_is_told_by_its_date_and_ran_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no result of a smoke run"):
        newest(tmp_path)
    runs = {"z-smoke": ("2026-11-24", False), "a-smoke": ("2026-11-25", False), "cpu-smoke": ("2026-11-26", True)}
    for name, (date, is_cpu) in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "is_cpu": is_cpu}), "utf-8")
    assert newest(tmp_path).name == "a-smoke.json"


def test_the_command_writes_the_table_and_nothing_else(tmp_path: Path) -> None:
    page, file = tmp_path / "measured.md", newest(RESULTS)
    page.write_text(f"before\n\n{BEGIN}\nold figures\n{END}\n\nafter\n", "utf-8")
    write_page(file, page)
    write_page(file, page)
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n\n{BEGIN}\n\n| ") and text.endswith(f"\n\n{END}\n\nafter\n")
    assert "old figures" not in text and text.count(file.name) == 1


@pytest.mark.parametrize("name", sorted(charts.charts()))
def test_a_chart_is_what_its_raw_files_give(name: str) -> None:
    """After a run: `python -m benchmarks.charts` draws them."""
    assert (charts.FOLDER / name).read_text("utf-8") == charts.charts()[name]


def test_readme_says_what_the_raw_files_say() -> None:
    found, ratios = charts.headline(), charts.by_memory()
    rows = charts.read("2026-11-30-h200-queue-node.json")["rows"]
    sums = {(row["model"], row["contender"]): sum(each["seconds"] for each in row["prompts"]) for row in rows}
    totals = [f"{sums[model, by]:.1f}" for model in ("Flux", "Qwen-Image") for by in ("resolute", "stock")]
    runs = [run["rows"][0]["events"] for run in charts.read("2026-11-30-h200-queue-new-size.json")["runs"]]
    steps = [
        after["seconds"]
        for events in runs
        for event, after in itertools.pairwise(events)
        if event["kind"] == "capture" and event["text"].startswith("2x4x90x120")
    ]
    sentences = [
        f"![{found.text()}](docs/charts/strip.svg)",
        f"latents differ by {100 * found.error:.2f} percent",
        f"took {found.firsts[1]:.1f} s, stock's {found.firsts[0]:.1f}",
        f"the second {found.seconds[1]:.2f} s, stock's {found.seconds[0]:.2f}",
        f"ran SDXL {ratios['SDXL', 8.0]:.1f} times as fast as stock, with 6 GiB {ratios['SDXL', 6.0]:.1f} times",
        "Flux's first 14 prompts took {} s, stock's {}, and Qwen-Image's {}, stock's {}.".format(*totals),
    ]
    assert len(steps) == 4
    sentences.append(f"its first step took {min(steps):.1f} to {max(steps):.1f} s on an H200")
    one_line = " ".join(README.split())
    assert [each for each in sentences if each not in one_line] == []
