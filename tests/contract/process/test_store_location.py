"""The digest of the source code that compiled regions depend on: of what the code says, not of how it is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def core(comfy: None, tmp_path: Path) -> Path:
    """A package `comfy` with one file, in the folder where ComfyUI is started."""
    folder = tmp_path / "comfy"
    folder.mkdir()
    (folder / "ops.py").write_text("one = 1\n", "utf-8")
    return folder


@pytest.fixture
def source(adapter: Callable[[str], ModuleType], core: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`source(path, ...)`: the digest where Python found the package at these paths."""
    monkeypatch.chdir(core.parent)
    persistence = adapter("process.store_location")

    def digest(*paths: str) -> str:
        monkeypatch.setattr(sys.modules["comfy"], "__path__", list(paths))
        monkeypatch.setattr(persistence, "comfy", sys.modules["comfy"])
        return str(persistence.source())

    return digest


def test_a_folder_that_is_found_twice_counts_once(source: Callable[..., str], core: Path) -> None:
    # ComfyUI's database puts "." in front of sys.path: twice in the start that makes it, once in later ones.
    once = source(str(core))
    assert source(str(core), "./comfy", "./comfy") == source("./comfy") == once


def test_other_code_is_another_source(source: Callable[..., str], core: Path) -> None:
    before = source(str(core))
    (core / "ops.py").write_text("one = 2\n", "utf-8")
    assert source(str(core)) != before


def test_the_order_in_which_folders_are_found_does_not_count(source: Callable[..., str], core: Path) -> None:
    other = core.parent / "elsewhere" / "comfy"
    other.mkdir(parents=True)
    (other / "more.py").write_text("two = 2\n", "utf-8")
    assert source(str(core), str(other)) == source(str(other), str(core)) != source(str(core))
