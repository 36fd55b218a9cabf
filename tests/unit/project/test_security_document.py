"""SECURITY.md and docs/faults.md name a test for each line: all of them are there."""

from __future__ import annotations

import ast
import re

import pytest

from scripts.places import ROOT

DOCUMENTS = ("SECURITY.md", "docs/faults.md")
TEXT = "\n".join((ROOT / name).read_text("utf-8") for name in DOCUMENTS)
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)+)`", TEXT)))
ROWS = [line for line in TEXT.splitlines() if line.startswith("|")]


def test_it_names_tests() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_it_names_is_there(name: str) -> None:
    file, *parts = name.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text("utf-8")).body
    for part in parts:
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
        assert len(found) == 1
        body = found[0].body


@pytest.mark.parametrize("line", ROWS)
def test_every_row_has_a_test_or_says_that_it_has_none(line: str) -> None:
    last = line.strip("| ").rpartition("|")[2].strip()
    assert "`tests/" in last or last.startswith(("none:", "---", "tests"))
