"""The shards of the tests: which test files one pytest runs, so that several can run side by side.

The test files of a folder are dealt out by their measured seconds, the slowest first, each to the shard that has least.
So a shard is the same on every machine, and changes only with the files and with tests/seconds.json.
``python -m scripts.commands.shards`` writes that table anew from the JUnit files of the last run of every shard.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ..errors import SetupError, as_command
from ..places import ROOT

# Each folder of tests with the number of its shards; tests/gpu has none, because it needs hardware.
FOLDERS = {"comfy": 4, "contract": 2, "unit": 1, "fleet": 1, "browser": 1, "oneflow": 1}
SECONDS = Path("tests") / "seconds.json"
USUAL_SECONDS = 10.0  # of a file that the table does not list
REPORTS = ROOT / "output" / "tests"  # the JUnit file and the log of each shard; git ignores it


def names() -> list[str]:
    """Every shard: "comfy-1", "comfy-2", ..., "unit"; the folders with most work first."""
    return [name for folder, count in FOLDERS.items() for name in _names_of(folder, count)]


def folder_of(name: str) -> str:
    """The folder of tests whose files a shard runs: "comfy" for "comfy-1"."""
    return name.partition("-")[0]


def files_of(name: str, root: Path = ROOT) -> list[Path]:
    """The test files of a shard, sorted."""
    folder = folder_of(name)
    files = [file.relative_to(root).as_posix() for file in (root / "tests" / folder).rglob("test_*.py")]
    dealt = deal(files, seconds(root), FOLDERS[folder])
    return [root / file for file in dealt[_names_of(folder, FOLDERS[folder]).index(name)]]


def deal(files: Iterable[str], seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Deal files out to `count` shards, so that each takes about as long as the others."""
    shards: list[list[str]] = [[] for _ in range(count)]
    load = [0.0] * count
    for file in sorted(files, key=lambda file: (-seconds.get(file, USUAL_SECONDS), file)):
        least = load.index(min(load))
        shards[least].append(file)
        load[least] += seconds.get(file, USUAL_SECONDS)
    return [sorted(shard) for shard in shards]


def seconds(root: Path = ROOT) -> dict[str, float]:
    """The seconds that each test file took when it was measured last; empty without a table."""
    table = root / SECONDS
    found: dict[str, float] = json.loads(table.read_text("utf-8")) if table.is_file() else {}
    return found


def measured(report: Path, root: Path = ROOT) -> dict[str, float]:
    """The seconds of each test file in a JUnit file of pytest's."""
    found: dict[str, float] = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        # tests.unit.test_keys.TestSignature: the file, then classes.
        parts = PurePosixPath(*str(case.get("classname")).split("."))
        for file in (f"{path}.py" for path in (parts, *parts.parents)):
            if (root / file).is_file():
                found[file] = found.get(file, 0.0) + float(case.get("time", 0))
                break
    return {file: round(took, 1) for file, took in sorted(found.items())}


def _names_of(folder: str, count: int) -> list[str]:
    return [folder] if count == 1 else [f"{folder}-{number}" for number in range(1, count + 1)]


def main() -> int:
    """Write the table; a file that has no report keeps what it had."""
    reports = sorted(REPORTS.glob("*.xml"))
    if not reports:
        raise SetupError(f"There is no JUnit file in {REPORTS}. Run `.ci/run` or `scripts/test --shard NAME` first.")
    table = {file: took for file, took in seconds().items() if (ROOT / file).is_file()}
    for report in reports:
        table |= measured(report)
    (ROOT / SECONDS).write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")
    print(f"{SECONDS}: {len(table)} files from {len(reports)} reports.")
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
