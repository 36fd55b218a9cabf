"""Chinese and Japanese: nothing that people read in the front end is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
WEB = ROOT / "web"
LANGUAGES = ("ja", "zh", "zh-TW")
CONSTANTS = {"zh": "CHINESE", "zh-TW": "TAIWANESE", "ja": "JAPANESE"}
HELP = sorted(path.stem for path in (WEB / "docs").glob("*.md"))


def locale(language: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))
    return loaded


def strings(language: str) -> dict[str, str]:
    """The texts of the panel in a language: English -> translation."""
    source = (WEB / "strings.js").read_text("utf-8")
    table = source.partition(f"const {CONSTANTS[language]} = {{")[2].partition("\n};")[0]
    pairs = re.findall(r'^  (?:"([^"]+)"|(\w+)):\s+"([^"]*)",$', table, re.MULTILINE)
    return {quoted or bare: text for quoted, bare, text in pairs}


def structure(value: Any) -> Any:
    """The keys of nested objects without their texts."""
    return {key: structure(each) for key, each in value.items()} if isinstance(value, dict) else None


def test_the_languages_are_those_of_the_folders() -> None:
    assert sorted(path.name for path in (ROOT / "locales").iterdir()) == sorted(LANGUAGES)


@pytest.mark.parametrize("name", ["main", "nodeDefs", "settings"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_the_same_keys_and_no_empty_text(language: str, name: str) -> None:
    assert structure(locale(language, name)) == structure(locale("zh", name))
    assert '""' not in json.dumps(locale(language, name))


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_setting_is_translated(language: str) -> None:
    source = (WEB / "settings.js").read_text("utf-8")
    names = set(re.findall(r'"(Resolute\.\w+)"', source))
    assert len(names) == 6
    assert set(locale(language, "settings")) == {name.replace(".", "_") for name in names}
    assert set(locale(language, "main")["settingsCategories"]) == {part for name in names for part in name.split(".")}


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_text_of_the_panel_is_translated(language: str) -> None:
    translated = strings(language)
    assert set(translated) == set(strings("zh"))
    sources = "".join(path.read_text("utf-8") for path in WEB.glob("*.js") if path.name != "strings.js")
    used = set(re.findall(r'\bt\(\s*"([^"]+)"', sources)) | set(re.findall(r'\bthis\.t\(\s*"([^"]+)"', sources))
    assert len(used) > 20
    assert used - set(translated) == set()
    for english, text in translated.items():
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", text)), english


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", HELP)
def test_each_help_page_is_translated_whole(node: str, language: str) -> None:
    english = (WEB / "docs" / f"{node}.md").read_text("utf-8")
    page = (WEB / "docs" / node / f"{language}.md").read_text("utf-8")
    assert page.startswith(f"# {locale(language, 'nodeDefs')[node]['display_name']}\n")
    assert page.count("\n## ") == english.count("\n## ")
    named = set(re.findall(r"^- `(\w+)`", english, re.MULTILINE))
    assert {name for name in named if f"`{name}`" not in page} == set()
    assert re.findall(r"\]\((images/\S+)\)", page) == re.findall(r"\]\((images/\S+)\)", english)


@pytest.mark.parametrize("node", HELP)
def test_the_pictures_of_the_help_exist(node: str) -> None:
    pictures = re.findall(r"\]\((images/\S+)\)", (WEB / "docs" / f"{node}.md").read_text("utf-8"))
    assert pictures
    for picture in pictures:
        assert (WEB / "docs" / picture).stat().st_size < 150_000
