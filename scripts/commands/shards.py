"""The shards of the tests: which test files one pytest runs, so that several can run side by side.

The test files of a folder are dealt out in turn, by name, so a shard is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path

from ..places import ROOT

# Each folder of tests with the number of its shards, the slowest shard first; tests/gpu has none, because it needs
# hardware. Each shard of tests/comfy compiles the models of its server anew, which takes minutes: so there are as many
# as run side by side.
FOLDERS = {"comfy": 2, "oneflow": 1, "browser": 1, "contract": 2, "fleet": 1, "unit": 2}
REPORTS = ROOT / "output" / "tests"  # the JUnit file and the log of each shard; git ignores it


def names() -> list[str]:
    """Every shard: "comfy-1", "comfy-2", "oneflow", ..., "unit-2"."""
    return [name for folder, count in FOLDERS.items() for name in _names_of(folder, count)]


def folder_of(name: str) -> str:
    """The folder of tests whose files a shard runs: "comfy" for "comfy-1"."""
    return name.partition("-")[0]


def files_of(name: str, root: Path = ROOT) -> list[str]:
    """The test files of a shard below the root, sorted."""
    folder = folder_of(name)
    count = FOLDERS[folder]
    files = sorted(file.relative_to(root).as_posix() for file in (root / "tests" / folder).rglob("test_*.py"))
    return files[_names_of(folder, count).index(name) :: count]


def report_of(name: str) -> Path:
    """The JUnit file of a shard."""
    return REPORTS / f"{name}.xml"


def _names_of(folder: str, count: int) -> list[str]:
    return [folder] if count == 1 else [f"{folder}-{number}" for number in range(1, count + 1)]
