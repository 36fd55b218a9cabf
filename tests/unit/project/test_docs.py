"""The documentation names only files, links, commands, options and tests that exist, and reference pages are whole."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_cache.backends.registry import CHOICES
from compile_cache.errors import BypassCode
from compile_cache.telemetry.stats import Counters

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    RESULTS / "README.md",
    *sorted((ROOT / "web" / "docs").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
FOLDERS = ("compile_cache", "nodes", "scripts", "benchmarks", "tests", "workflows", "web", "docs", "typings")
# Paths that pages may name although git does not track them: made by set-up, by a user or by ComfyUI, or elsewhere.
ELSEWHERE = re.compile(r"\.venv|\.comfyui|~|output/|custom_nodes/|user/|models/checkpoints|fleet/|shapes/|measured/|/")
OF_COMFYUI = {"--disable-dynamic-vram", "--force-fp32", "--cpu"}
TOOLS = {"bandit", "ruff", "mypy", "pytest"}  # that `python -m` starts; requirements/dev.txt has them

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PLACEHOLDER = re.compile(r"\b(FILE|FOLDER|NAME|URL|WORKFLOW|DATE|GPU)\b")
_PATH = re.compile(r"[\w.*/-]+(/|\.(py|md|json|txt|toml|yml|yaml|png|svg|jpg))")


def complaints(page: Path, text: str) -> list[str]:
    """What is wrong on a page, one sentence each."""
    prose = _FENCE.sub("", text)
    spans = [span.strip() for span in re.findall(r"`([^`\n]+)`", prose)]
    lines = [line for block in _FENCE.findall(text) for line in block.splitlines()[1:-1]]
    links = [link for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose) if not re.match(r"\w+:", link)]
    found = [f"link to {link}" for link in links if not _leads_somewhere(page, link)]
    found += [f"no path {span}" for span in spans if _PATH.fullmatch(span) and not _exists(span, page)]
    for line in [*spans, *lines]:
        found += _wrong_in_command(line)
    return found


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", target.read_text("utf-8")), re.MULTILINE)
    # As GitHub makes anchors.
    return anchor in {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def _exists(path: str, page: Path) -> bool:
    """A page may shorten `nodes/adapters/blocks/unets/unet.py` to `unet.py`, and a result's name after its date."""
    if ELSEWHERE.match(path):
        return True
    if _PLACEHOLDER.search(path):
        path = path.rpartition("/")[0]
    if path.startswith("...") and path.endswith(".json"):
        return any(RESULTS.glob(f"*{path[3:]}"))
    if any((folder / path).exists() for folder in (ROOT, page.parent, RESULTS)):
        return True
    return any(each.endswith(f"/{path.rstrip('/')}") for each in _paths())


@functools.cache
def _paths() -> frozenset[str]:
    """Files of the source and their folders."""
    files = [each for folder in FOLDERS for each in (ROOT / folder).rglob("*") if "__pycache__" not in each.parts]
    return frozenset(f"/{each.relative_to(ROOT).as_posix()}" for each in files)


def _wrong_in_command(line: str) -> Iterator[str]:
    """A command in the text or in a block: its file, its options and the paths that it passes on."""
    words = line.split()
    if words and re.fullmatch(r"(\.venv/bin/)?python", words[0]):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1 and words[1] not in TOOLS:
        file = ROOT.joinpath(*words[1].split(".")).with_suffix(".py")
        file = file if file.is_file() else file.with_suffix("") / "__main__.py"
    elif words and re.fullmatch(r"scripts/[\w-]+|\.ci/\w+", words[0]):
        file = ROOT / words[0]
    else:
        return
    name = " ".join(words[: 1 + (words[0] == "-m")])
    if _PLACEHOLDER.search(name):
        return
    if not file.is_file():
        yield f"no command {name}"
        return
    own, _, passed = line.partition(" -- ")
    for option in re.findall(r"(?<=\s)--[a-z][\w-]*", own):
        if option not in _options(file):
            yield f"{name} has no option {option}"
    yield from (f"no path {word}" for word in passed.split() if "/" in word and not (ROOT / word).exists())


@functools.cache
def _options(file: Path) -> frozenset[str]:
    """The options in the text of a command; benchmarks share those of their folder."""
    file = ROOT / "scripts" / "test" if file.name == "run" else file  # .ci/run passes its arguments on
    files = [*file.parent.glob("*.py")] if file.parent.name == "benchmarks" else [file]
    return frozenset(re.findall(r'"(--[a-z][\w-]*)"', "".join(each.read_text("utf-8") for each in files))) | OF_COMFYUI


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_only_what_exists(page: Path) -> None:
    assert complaints(page, page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("problems.md", [code.value for code in BypassCode]),
        ("servers.md", [counter.name for counter in dataclasses.fields(Counters)]),
        ("settings.md", re.findall(r'"(RESOLUTE_\w+)"', (ROOT / "compile_cache" / "config.py").read_text("utf-8"))),
        ("settings.md", CHOICES),
    ],
)
def test_a_reference_page_leaves_nothing_out(page: str, names: list[str]) -> None:
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs" / page).read_text("utf-8")))
    assert names and [name for name in names if name not in listed] == []


def test_each_line_of_security_and_of_faults_names_a_test_that_is_there() -> None:
    text = "\n".join((ROOT / name).read_text("utf-8") for name in ("SECURITY.md", "docs/dev/faults.md"))
    last = [line.strip("| ").rpartition("|")[2].strip() for line in text.splitlines() if line.startswith("|")]
    assert [each for each in last if "`tests/" not in each and not each.startswith(("none:", "---", "tests"))] == []
    named = set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)+)`", text))
    assert len(named) > 40
    assert [name for name in named if not _has_test(name)] == []


def test_each_raw_file_is_named_and_nobody_names_a_repository_that_is_not_there() -> None:
    text = (RESULTS / "README.md").read_text("utf-8")
    files = {each.name: each.stem.partition("first-prompts-")[2] or each.name for each in RESULTS.glob("*.json")}
    assert [name for name, short in files.items() if name not in text and f"`{short}`" not in text] == []
    assert [page for page in PAGES if "OWNER/" in page.read_text("utf-8")] == []  # pyproject.toml has it


def test_the_pages_stay_short() -> None:
    """As `wc -w` counts. Raw files have a page of their own beside them, which does not count."""
    words = {page: len(page.read_text("utf-8").split()) for page in PAGES}
    readme = words[ROOT / "README.md"]
    docs = sum(count for page, count in words.items() if page.is_relative_to(ROOT / "docs"))
    assert readme <= 900 and readme + docs <= 11_000, words


def _has_test(name: str) -> bool:
    file, *parts = name.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text("utf-8")).body if (ROOT / file).is_file() else []
    for part in parts:
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True
