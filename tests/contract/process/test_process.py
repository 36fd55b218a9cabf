"""What the pack sets and reads once in a process."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compile_cache.config import COMPILE, CacheConfig

# Python's collector, as the pack leaves it.


@pytest.mark.parametrize(
    ("before", "after"),
    [((700, 10, 10), (700, 10, 1000)), ((0, 10, 10), (0, 10, 1000)), ((5000, 20, 4000), (5000, 20, 4000))],
    ids=["Python's own", "switched off", "a user's"],
)
def test_only_collections_of_all_objects_become_rare(
    adapter: Callable[[str], ModuleType], before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    gc.set_threshold(*before)  # a fixture of all tests sets it back
    adapter("process.collector").make_full_collections_rare()
    assert gc.get_threshold() == after


# Settings of ComfyUI's dialog become variables; a value that the dialog does not offer counts for nothing.


DIALOG = (Path(__file__).resolve().parents[3] / "web" / "settings.js").read_text("utf-8")


@pytest.fixture
def module(adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("RESOLUTE_COMPILE", raising=False)
    return adapter("process.user_settings")


@pytest.mark.parametrize(
    ("value", "text"), [("behind", "behind"), ("before", "before"), ("soon", None), (True, None), ([], None)]
)
def test_when_to_compile_is_one_of_two_words(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: Any, text: str | None
) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "comfy.settings.json").write_text(json.dumps({"Resolute.Compile": value}), "utf-8")
    monkeypatch.setattr(module.folder_paths, "get_user_directory", lambda: str(tmp_path))
    given = module.variables()
    assert given.get("RESOLUTE_COMPILE") == text
    assert CacheConfig.from_environment({}, settings=given).compile == (text or CacheConfig().compile)
    assert CacheConfig.from_environment({"RESOLUTE_COMPILE": "behind"}, settings=given).compile == "behind"


def test_the_dialog_offers_what_the_variable_takes_and_has_its_default() -> None:
    assert f'const WHEN = "{CacheConfig().compile}"' in DIALOG
    offered = next(line for line in re.findall(r"options: \[(.*)\]", DIALOG) if "behind" in line)
    assert set(re.findall(r'"(\w+)"', offered)) == set(COMPILE)
