"""The page of what runs on what is made from recorded results, and a run that fails is on it."""

from __future__ import annotations

from pathlib import Path

from scripts.commands import compatibility
from scripts.setup import comfyui

ROOT = Path(__file__).resolve().parents[3]

REPORT = """<testsuites><testsuite name="pytest"><properties><property name="torch" value="2.11.0"/></properties>
<testcase classname="tests.a" name="right"/>
<testcase classname="tests.a" name="wrong"><failure message="no"/></testcase>
<testcase classname="tests.b" name="broken"><error message="no"/></testcase>
<testcase classname="tests.b" name="left out"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_and_its_failures_are_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    counted = compatibility.count_outcomes(report)
    assert (counted["passed"], counted["failed"], counted["skipped"]) == (1, 2, 1)
    assert counted["failures"] == ["tests.a::wrong", "tests.b::broken"]
    assert counted["torch"] == "2.11.0"


def test_the_page_is_what_the_results_give() -> None:
    recorded = compatibility.read_results(ROOT)
    assert (ROOT / compatibility.PAGE).read_text("utf-8") == compatibility.page_of(recorded)
    assert set(recorded) <= {target.name for target in compatibility.TARGETS}


def test_the_page_has_a_row_for_each_pinned_comfyui_and_says_what_was_not_run() -> None:
    page = compatibility.page_of({})
    assert all(f" {version} " in page for version in comfyui.VERSIONS)
    assert page.count("not run") == len(compatibility.TARGETS)


def test_a_failure_is_on_the_page() -> None:
    target = compatibility.TARGETS[0]
    found = {"passed": 3, "failed": 1, "skipped": 0, "failures": ["tests.a::wrong"], "torch": "2.11.0"}
    page = compatibility.page_of({target.name: {**found, "day": "2026-11-22", "commit": "abc", "selection": "-k old"}})
    assert "| 2.11.0 | 3 | 1 | 0 | 2026-11-22 | abc |" in page
    assert "(only `-k old`)" in page
    assert f"- {target.name}: tests.a::wrong" in page
