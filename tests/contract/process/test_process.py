"""What the pack sets and reads once in a process."""

from __future__ import annotations

import gc
import json
import re
import sys
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


# The digest of ComfyUI's source: of what the code says, not of how it is found. Another one compares stored code anew.


@pytest.fixture
def core(comfy: None, tmp_path: Path) -> Path:
    """A package `comfy` with one file, in the folder where ComfyUI is started."""
    folder = tmp_path / "comfy"
    folder.mkdir()
    (folder / "ops.py").write_text("one = 1\n", "utf-8")
    return folder


@pytest.fixture
def application(
    adapter: Callable[[str], ModuleType], core: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """`application(path, ...)`: the digest where Python found the package at these paths."""
    monkeypatch.chdir(core.parent)
    location = adapter("process.store_location")

    def digest(*paths: str) -> str:
        monkeypatch.setattr(sys.modules["comfy"], "__path__", list(paths))
        monkeypatch.setattr(location, "comfy", sys.modules["comfy"])
        return str(location.application())

    return digest


def test_a_folder_that_is_found_twice_counts_once(application: Callable[..., str], core: Path) -> None:
    # ComfyUI's database puts "." in front of sys.path: twice in the start that makes it, once in later ones.
    once = application(str(core))
    assert application(str(core), "./comfy", "./comfy") == application("./comfy") == once


def test_other_code_is_another_application(application: Callable[..., str], core: Path) -> None:
    before = application(str(core))
    (core / "ops.py").write_text("one = 2\n", "utf-8")
    assert application(str(core)) != before


def test_the_order_in_which_folders_are_found_does_not_count(application: Callable[..., str], core: Path) -> None:
    other = core.parent / "elsewhere" / "comfy"
    other.mkdir(parents=True)
    (other / "more.py").write_text("two = 2\n", "utf-8")
    assert application(str(core), str(other)) == application(str(other), str(core)) != application(str(core))


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
