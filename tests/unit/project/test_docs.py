"""The documentation names only what exists, and a newcomer finds the answer to eight questions in two clicks."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_cache.backends.registry import CHOICES
from compile_cache.errors import BypassCode
from compile_cache.stats import Counters

from .documentation import FOREIGN, ROOT, complaints, links, spans

HOW = ROOT / "docs" / "how-it-works.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in [ROOT / "SECURITY.md"] if page.is_file()),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "web" / "docs").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
QUESTIONS = [
    "Where is a capture made?",
    "What decides between replay and eager?",
    "What makes a signature?",
    "How is FreeU recognised?",
    "How do I add a model family?",
    "How do I add a backend?",
    "Where do weights come from?",
    "Where does a restart load its regions?",
]
MOST_WORDS = 1300


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_only_what_exists(page: Path) -> None:
    assert complaints(page) == []


def test_no_exception_outlives_its_page() -> None:
    used = "".join(page.read_text("utf-8") for page in PAGES)
    assert [name for names in FOREIGN.values() for name in names if name not in used] == []


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links((ROOT / "README.md").read_text("utf-8"))}
    assert {name_of(page) for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.split()) < MOST_WORDS
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("troubleshooting.md", [code.value for code in BypassCode]),
        ("servers.md", [counter.name for counter in dataclasses.fields(Counters)]),
        ("settings.md", re.findall(r'"(RESOLUTE_\w+)"', (ROOT / "compile_cache" / "config.py").read_text("utf-8"))),
        ("backends.md", CHOICES),
    ],
)
def test_a_reference_page_leaves_nothing_out(page: str, names: list[str]) -> None:
    assert names
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs" / page).read_text("utf-8")))
    assert [name for name in names if name not in listed] == []


def rows() -> dict[str, str]:
    """The tables of "Where is ...?" in how-it-works: the question, and the rest of its line."""
    section = HOW.read_text("utf-8").partition("## Where is ...?")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| ")]
    return {question: rest for question, rest in lines if question != "question"}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_leads_to_the_files_that_answer_it(question: str) -> None:
    row = rows()[question]
    files = [(HOW.parent / link.partition("#")[0]).resolve() for link in links(row)]
    assert files
    text = "".join(file.read_text("utf-8") for file in files)
    assert [name for name in spans(row) if not re.search(rf"\b{re.escape(name)}\b", text)] == []


def steps() -> list[Path]:
    """The file of each numbered line of the drawing."""
    drawing = HOW.read_text("utf-8").partition("## One prompt's way through the code")[2].split("```")[1]
    return [ROOT / path for path in re.findall(r"^ *\d [A-Z]+ +(\S+\.py) ", drawing, re.MULTILINE)]


def imported_by(file: Path) -> Iterator[Path]:
    """The files that a file of the pack imports by relative imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for path in (base, *(base / alias.name for alias in node.names)):
                if path.with_suffix(".py").is_file():
                    yield path.with_suffix(".py")


def reachable_from(file: Path) -> set[Path]:
    found, pending = set[Path](), [file]
    while pending:
        new = set(imported_by(pending.pop())) - found
        found |= new
        pending += new
    return found


def test_the_walk_through_the_code_never_goes_back_up() -> None:
    walk = steps()
    assert len(walk) == 7
    assert walk[1] in reachable_from(walk[0])
    for number, file in enumerate(walk):
        assert reachable_from(file) & set(walk[:number]) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "[a page](missing.md)",
        "[a heading](README.md#no-such-heading)",
        "![a picture](docs/missing.png)",
        "`compile_cache/missing.py`",
        "`missing.py`",
        "`nodes/missing/`",
        "`2026-01-01-missing.json`",
        "`...-missing.json`",
        "`NoSuchClass`",
        "`no_such_function`",
        "`nosuchword`",
        "`GraphCache.no_such_method`",
        "`no_such_module.run`",
        "`hooks(module, no_such_argument)`",
        "`no text says this`",
        '`{"no_such_key": 1}`',
        "`RESOLUTE_MISSING`",
        "`RESOLUTE_MISSING=0`",
        "`GET /resolute/missing`",
        "`POST /resolute/cache`",
        "`scripts/missing`",
        "`scripts/test --no-such-option`",
        "`scripts/test -- tests/missing`",
        "`.ci/checks --quick`",
        "`scripts/bundle missing FILE`",
        "`python -m benchmarks.missing`",
        "`python -m benchmarks.run --quick`",
        "`--no-such-option`",
        "`tests/unit --no-such-option`",
        "```\nscripts/test --no-such-option\n```",
        "```\n1 NODE   nodes/missing.py   one call\n```",
        "```\nCACHE   GraphCache.no_such_method: look up\n```",
    ],
)
def test_the_check_finds_what_does_not_exist(wrong: str) -> None:
    assert len(complaints(ROOT / "README.md", f"Some words, then {wrong}." if "\n" not in wrong else wrong)) == 1


@pytest.mark.parametrize(
    "right",
    [
        "[a page](docs/measured.md#oneflow)",
        "[elsewhere](https://example.org/missing.md)",
        "`compile_cache/calls/cache.py`",
        "`cache.py`",
        "`GraphCache.run`",
        "`hooks(module, run, bypass)`",
        "`RESOLUTE_STORE=0`",
        "`GET /resolute/cache`",
        "`scripts/test --quick -- tests/unit`",
        "`.ci/run --oldest-torch`",
        "`scripts/bundle show FILE`",
        "`python -m benchmarks.run tour --model sdxl --out FILE`",
        "`--oneflow`",
        "`1024x1024, 720x960`",
        "```\nscripts/test --quick\n1 NODE   nodes/compile_model.py   CompileModel\n```",
    ],
)
def test_the_check_lets_pass_what_exists(right: str) -> None:
    assert complaints(ROOT / "README.md", right) == []
