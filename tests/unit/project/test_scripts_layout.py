"""The layout of scripts/ and benchmarks/, read from the source: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

from .test_architecture import MAX_LINES, ROOT, circle, climbs

SCRIPTS, BENCHMARKS = ROOT / "scripts", ROOT / "benchmarks"
COMMANDS = [file for file in sorted(SCRIPTS.iterdir()) if file.is_file() and not file.suffix]
FILES = [*COMMANDS, *sorted(SCRIPTS.rglob("*.py"))]
# Tests of benchmarks; nothing else imports them.
TESTS_OF_BENCHMARKS = {
    "tests/comfy/test_vae_tiles.py",  # of the models that benchmarks.video_models makes
    "tests/comfy/test_video_benchmark.py",
    "tests/unit/benchmarks/test_ballast.py",
    "tests/unit/benchmarks/test_cells.py",
    "tests/unit/benchmarks/test_fleet.py",
    "tests/unit/benchmarks/test_gguf_file.py",
    "tests/unit/benchmarks/test_plan.py",
    "tests/unit/benchmarks/test_rig.py",
    "tests/unit/benchmarks/test_run.py",
    "tests/unit/benchmarks/test_smoke.py",
    "tests/unit/benchmarks/test_smoke_run.py",
    "tests/unit/benchmarks/test_soak.py",
    "tests/unit/project/test_readme_results.py",
}
# What a command imports before it has an environment: the standard library and its like.
BEFORE_THE_ENVIRONMENT = (
    "scripts/setup/",
    "scripts/server/",
    "scripts/errors.py",
    "scripts/places.py",
    "scripts/ports.py",
)

# The order of imports, from the top down, as in test_architecture.py.
FLOORS = [
    tuple(f"scripts/{file.name}" for file in COMMANDS),
    ("scripts/commands", "scripts/pictures", "scripts/serving"),
    ("scripts/demonstration",),
    ("scripts/browser", "scripts/workflows"),
    ("scripts/models", "scripts/server", "scripts/setup"),
    ("scripts",),  # errors, places, ports, pack
]
PLACES = {place: floor for floor, places in enumerate(FLOORS) for place in places}


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), str(file))


def imported_modules(file: Path) -> set[str]:
    """Full names of all modules, and of all names in them, that a file imports anywhere."""
    package = list(file.relative_to(ROOT).parent.parts)
    found: set[str] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def imported_scripts(file: Path) -> set[str]:
    """The files of scripts/, without `__init__.py`, that a file imports."""
    paths = (name.replace(".", "/") + ".py" for name in imported_modules(file) if name.startswith("scripts."))
    return {path for path in paths if (ROOT / path).is_file()}


IMPORTS = {file.relative_to(ROOT).as_posix(): imported_scripts(file) for file in FILES}


def test_no_import_climbs() -> None:
    climbing = {(file, other) for file, found in IMPORTS.items() for other in found if climbs(file, other, PLACES)}
    assert climbing == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(IMPORTS) == []


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(ROOT).as_posix() for path in SCRIPTS.iterdir() if any(path.glob("*.py"))}
    assert rooms == {place for place in PLACES if (ROOT / place).is_dir()} - {"scripts"}
    assert [place for place in PLACES if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    ("importer", "imported", "climbing"),
    [
        ("scripts/fleet", "scripts/serving/command.py", False),
        ("scripts/serving/command.py", "scripts/errors.py", False),
        ("scripts/demonstration/plan.py", "scripts/pictures/jpeg.py", True),
        ("scripts/setup/comfyui.py", "scripts/server/client.py", True),
        ("scripts/errors.py", "scripts/models/generated.py", True),
    ],
)
def test_imports_upward_and_across_are_climbs(importer: str, imported: str, climbing: bool) -> None:
    assert climbs(importer, imported, PLACES) == climbing


def test_imports_are_found_however_they_are_written() -> None:
    assert "scripts/serving/command.py" in IMPORTS["scripts/fleet"]  # `from scripts.serving import command`
    assert "scripts/serving/application.py" in IMPORTS["scripts/serving/command.py"]  # inside a function
    assert "scripts/places.py" in IMPORTS["scripts/setup/command.py"]  # `from ..places import ROOT`


def test_nothing_but_their_tests_imports_benchmarks() -> None:
    folders = ("compile_cache", "nodes", "scripts", "tests")
    files = [*COMMANDS, *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    importing = {
        file.relative_to(ROOT).as_posix()
        for file in files
        if any(name.partition(".")[0] == "benchmarks" for name in imported_modules(file))
    }
    assert importing == TESTS_OF_BENCHMARKS


def test_what_runs_before_the_environment_needs_the_standard_library_alone() -> None:
    needed = {
        (name, module)
        for name in IMPORTS
        if name.startswith(BEFORE_THE_ENVIRONMENT)
        for node in tree_of(ROOT / name).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for module in [getattr(node, "module", None) or node.names[0].name]
        if module.partition(".")[0] not in sys.stdlib_module_names
    }
    assert needed == set()


def test_a_file_has_a_docstring_and_at_most_300_lines() -> None:
    files = [*FILES, *BENCHMARKS.rglob("*.py")]
    assert [file for file in files if not ast.get_docstring(tree_of(file))] == []
    lengths = {file.relative_to(ROOT).as_posix(): len(file.read_text("utf-8").splitlines()) for file in files}
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_each_result_is_named_by_a_document() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"[\w.-]+\.json", page.read_text("utf-8"))}
    results = [file.name for file in (BENCHMARKS / "results").iterdir()]
    unnamed = [each for each in results if not any(each.endswith(name.removeprefix("...")) for name in named)]
    assert unnamed == []


def test_bandit_looks_at_the_server_of_our_own() -> None:
    # test_ci_files.py compares the hooks with `.ci/run` and CONTRIBUTING.md.
    line = re.search(r"-m bandit .*", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert line is not None
    assert "scripts/serving" in line[0].split()
