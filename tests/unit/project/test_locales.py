"""Chinese and Japanese: nothing that people read in the front end is missing."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.workflows.node_types import NODE_TYPES, NOTE

ROOT = Path(__file__).resolve().parents[3]
WEB = ROOT / "web"
LANGUAGES = ("ja", "zh", "zh-TW")
HELP = sorted(path.stem for path in (WEB / "docs").glob("*.md"))


def locale(language: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))
    return loaded


def strings(language: str) -> dict[str, str]:
    """The texts of the front end in a language: English -> translation."""
    source = (WEB / "languages" / f"{language}.js").read_text("utf-8")
    table: dict[str, str] = json.loads(source.partition("export default ")[2].rstrip().removesuffix(";"))
    return table


def templates(tree: ast.Module) -> Iterator[str]:
    """The templates of each Text in a file, and the separators of those that join others.

    A name that is given to Text is what the same function assigns to it.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("Text", "Text.joined"):
            continue
        template = call.args[0]
        if isinstance(template, ast.Constant):
            yield str(template.value)
            continue
        assert isinstance(template, ast.Name), ast.unparse(call)
        inside = [each for each in functions if each.lineno <= call.lineno <= (each.end_lineno or 0)][-1]
        assigned = [node for node in ast.walk(inside) if isinstance(node, ast.Assign)]
        found = [node.value for node in assigned if ast.unparse(node.targets[0]) == template.id]
        texts = [str(value.value) for value in found if isinstance(value, ast.Constant)]
        assert texts, ast.unparse(call)
        yield from texts


def of_the_server() -> set[str]:
    """Templates of the sentences that the server sends."""
    files = [*(ROOT / "compile_cache").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]
    trees = [ast.parse(path.read_text("utf-8")) for path in files if path.name != "texts.py"]
    return {text for tree in trees for text in templates(tree)} - {"\n"}


def of_the_bundled_workflows() -> set[str]:
    """Lines of their notes, and titles of frames and of nodes that are no names of types."""
    found = set()
    for path in (ROOT / "workflows").glob("*.json"):
        graph = json.loads(path.read_text("utf-8"))
        found |= {group["title"] for group in graph["groups"]}
        for node in graph["nodes"]:
            if node["title"] != NODE_TYPES[node["type"]].title or node["type"] == NOTE:
                found.add(node["title"])
            if node["type"] == NOTE:
                found |= set(node["widgets_values"][0].splitlines())
    return {text for text in found if re.search("[a-z]{3}", text)}


def in_the_front_end() -> tuple[set[str], set[str]]:
    """Texts that it translates, and all its texts in quotes: some reach the translation by way of a table."""
    sources = "".join(path.read_text("utf-8") for path in WEB.glob("*.js"))
    quoted = set(re.findall(r'"([^"\n]+)"', sources)) | set(re.findall(r"^\s+(\w+): ", sources, re.MULTILINE))
    return set(re.findall(r'\bt\(\s*"([^"]+)"', sources)), quoted


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
def test_each_text_that_people_read_is_translated_and_no_other(language: str) -> None:
    translated = strings(language)
    panel, quoted = in_the_front_end()
    server, bundled = of_the_server(), of_the_bundled_workflows()
    assert min(len(panel), len(server), len(bundled)) > 40
    assert (panel | server | bundled) - set(translated) == set()
    titles = {node_type.title for node_type in NODE_TYPES.values()}
    assert set(translated) - (quoted | server | bundled | titles) == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_has_the_values_of_its_text(language: str) -> None:
    for english, text in strings(language).items():
        assert text
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", text)), english


def test_a_template_behind_a_name_is_found() -> None:
    tree = ast.parse("def make():\n    text = 'a {b}'\n    text = 'c'\n    return Text(text), Text.joined(', ', [])")
    assert sorted(templates(tree)) == [", ", "a {b}", "c"]


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
