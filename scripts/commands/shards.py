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

# Each folder of tests with the number of its shards, the slowest shard first; tests/gpu has none, because it needs
# hardware. Each shard of tests/comfy compiles the models of its server anew, which takes minutes: so there are as many
# as run side by side.
FOLDERS = {"comfy": 2, "oneflow": 1, "browser": 1, "contract": 2, "fleet": 1, "unit": 2}
TABLE = Path("tests") / "seconds.json"
USUAL = 10.0  # seconds of a file that the table does not list
REPORTS = ROOT / "output" / "tests"  # the JUnit file and the log of each shard; git ignores it


def names() -> list[str]:
    """Every shard: "comfy-1", "comfy-2", "contract-1", ..., "oneflow"."""
    return [name for folder, count in FOLDERS.items() for name in _names_of(folder, count)]


def folder_of(name: str) -> str:
    """The folder of tests whose files a shard runs: "comfy" for "comfy-1"."""
    return name.partition("-")[0]


def files_of(name: str, root: Path = ROOT) -> list[str]:
    """The test files of a shard below the root, sorted."""
    folder = folder_of(name)
    files = [file.relative_to(root).as_posix() for file in (root / "tests" / folder).rglob("test_*.py")]
    dealt = deal(files, table(root), FOLDERS[folder])
    return dealt[_names_of(folder, FOLDERS[folder]).index(name)]


def report_of(name: str) -> Path:
    """The JUnit file of a shard."""
    return REPORTS / f"{name}.xml"


def deal(files: Iterable[str], seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Deal files out to `count` shards, so that each takes about as long as the others."""
    shards: list[list[str]] = [[] for _ in range(count)]
    load = [0.0] * count
    for file in sorted(files, key=lambda file: (-seconds.get(file, USUAL), file)):
        least = load.index(min(load))
        shards[least].append(file)
        load[least] += seconds.get(file, USUAL)
    return [sorted(shard) for shard in shards]


def table(root: Path = ROOT) -> dict[str, float]:
    """The seconds of each test file, its long tests left out, as measured last; empty without a table."""
    file = root / TABLE
    found: dict[str, float] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
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
    return {file: round(seconds, 1) for file, seconds in sorted(found.items())}


def _names_of(folder: str, count: int) -> list[str]:
    return [folder] if count == 1 else [f"{folder}-{number}" for number in range(1, count + 1)]


def main() -> int:
    """Write the table; the files of a shard that has no report keep what they had."""
    reports = [report for report in map(report_of, names()) if report.is_file()]
    if not reports:
        raise SetupError(f"There is no JUnit file in {REPORTS}. Run `scripts/test` first.")
    # A file that its shard's report lacks has only long tests.
    rows = table() | {file: 0.0 for report in reports for file in files_of(report.stem)}
    for report in reports:
        rows |= measured(report)
    kept = {file: seconds for file, seconds in rows.items() if (ROOT / file).is_file()}
    (ROOT / TABLE).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
    print(f"{TABLE}: {len(kept)} files from {len(reports)} reports.")
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
