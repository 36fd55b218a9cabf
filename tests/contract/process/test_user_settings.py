"""Settings of ComfyUI's dialog become variables; a value that the dialog does not offer counts for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compile_cache.config import COMPILE, CacheConfig

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
