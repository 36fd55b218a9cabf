"""The table of compatibility: results of the tests on each ComfyUI and torch, and the page that shows them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..setup import comfyui

RESULTS = Path("docs") / "dev" / "compatibility.json"
PAGE = RESULTS.with_suffix(".md")
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table. arguments: of `scripts/test`."""

    name: str
    what: str
    arguments: tuple[str, ...]


TARGETS = (
    Target(f"ComfyUI {comfyui.OLDEST}", "the oldest supported", ("--old",)),
    Target(f"ComfyUI {comfyui.SPRING}", "of April 2026, with an older DynamicVRAM", ("--spring",)),
    Target(f"ComfyUI {comfyui.TARGET}", "the one that everything is developed on", ("--", "tests/comfy")),
    Target(f"ComfyUI of {comfyui.NEWEST}", "the newest in reach", ("--newest",)),
    Target("oldest torch", "pinned in `requirements-oldest-torch.txt`", ("--oldest-torch",)),
    Target("newest torch", "pinned in `requirements-newest-torch.txt`", ("--newest-torch",)),
    Target("torch of the environment", "as ComfyUI's requirements install it", ("--", "tests/contract")),
)

_HEAD = """# Compatibility

`scripts/compatibility` runs the tests below and writes this page from what they gave
([compatibility.json](compatibility.json)). Server tests run on the CPU; [measured](../measured.md) has the GPU.

| on | what it is | command | torch | passed | failed | skipped | day | commit |
|---|---|---|---|---|---|---|---|---|
"""


def read_results(root: Path) -> dict[str, dict[str, Any]]:
    """The recorded results, by the names of their targets."""
    file = root / RESULTS
    results: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return results


def count_outcomes(report: Path) -> dict[str, Any]:
    """The outcomes in a JUnit file of pytest's, the names of the tests that failed, and the torch that they ran on."""
    counts, failed = Counter[str](), []
    suites = xml.parse(report).getroot()
    torch = [each.get("value") for each in suites.iter("property") if each.get("name") == "torch"]
    for case in suites.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {**{name: counts[name] for name in OUTCOMES}, "failures": sorted(failed), "torch": torch[0] if torch else ""}


def write_results(root: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the results and write the page anew."""
    (root / RESULTS).write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", "utf-8")
    (root / PAGE).write_text(page_of(results), "utf-8")


def page_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page for these results; a target that was not run says so."""
    rows, failures = [], []
    for target in TARGETS:
        found = results.get(target.name)
        command = f"`scripts/test {' '.join(target.arguments)}`"
        if found is None:
            rows.append(f"| {target.name} | {target.what} | {command} | | not run | | | | |")
            continue
        counts = " | ".join(str(found[name]) for name in OUTCOMES)
        selection = found.get("selection", "").replace(" tests/", "`, `tests/")
        chosen = f" (only `{selection}`)" if selection else ""
        rows.append(
            f"| {target.name} | {target.what} | {command}{chosen} | {found['torch']} | {counts} | {found['day']} "
            f"| {found['commit']} |"
        )
        failures += [f"- {target.name}: {name}" for name in found["failures"]]
    end = "\n## Failures\n\n" + "\n".join(failures) + "\n" if failures else ""
    return _HEAD + "\n".join(rows) + "\n" + end
