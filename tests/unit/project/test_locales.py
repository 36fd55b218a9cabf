"""Chinese and Japanese: nothing that people read in the front end is missing."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import workflows

ROOT = Path(__file__).resolve().parents[3]
WEB = ROOT / "web"
LANGUAGES = ("ja", "zh", "zh-TW")


def locale(language: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))
    return loaded


def strings(language: str) -> dict[str, str]:
    """The texts of the front end in a language: English -> translation."""
    source = (WEB / "languages" / f"{language}.js").read_text("utf-8")
    table: dict[str, str] = json.loads(source.partition("export default ")[2].rstrip().removesuffix(";"))
    return table


def of_the_server() -> set[str]:
    """The templates of the sentences that the server sends: in a call of Text, or assigned to `text` for one."""
    found = set()
    for file in (file for folder in ("compile_cache", "nodes") for file in (ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Text"]
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "text"]
        takes_a_name = any(isinstance(call.args[0], ast.Name) for call in calls)
        values = [call.args[0] for call in calls] + [node.value for node in assigned if takes_a_name]
        found |= {node.value for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found - {"\n"}


# Errors of these are for scripts and the log: variables of the environment, and requests that no page sends.
FOR_SCRIPTS = {"config.py", "request.py", "request_limits.py", "workflow.py", "bundle.py"}


def errors_of_the_server() -> set[str]:
    """The templates of the errors that stop a prompt or a button, with numbered values; web/strings.js finds them."""
    found = set()
    for file in (file for folder in ("compile_cache", "nodes") for file in (ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8")))) if file.name not in FOR_SCRIPTS else []
        kinds = [
            node for node in nodes if isinstance(node, ast.ClassDef) and "UserError" in map(ast.unparse, node.bases)
        ]
        calls = {"UserError": nodes, "super().__init__": [node for kind in kinds for node in ast.walk(kind)]}
        for name, places in calls.items():
            made = [node for node in places if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
            found |= {numbered(call.args[0]) for call in made if call.args}
    return {text for text in found if len(re.sub(r"\{\d+\}", "", text)) >= 20}


def reasons_of_the_backends() -> set[str]:
    """Why a backend cannot run here, and what to do: values of an error, whose templates are numbered too."""
    found = set()
    for file in (ROOT / "compile_cache" / "backends").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Lack", "_missing"):
                given = node.args
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Capabilities":
                given = [each.value for each in node.keywords if each.arg in ("reason", "remedy")]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("reason", "remedy"):
                given = [node.value]
            elif isinstance(node, ast.Return) and file.name == "packages.py" and isinstance(node.value, ast.Tuple):
                given = node.value.elts
            else:
                continue
            found |= {numbered(text) for text in given if isinstance(text, ast.Constant | ast.JoinedStr)}
    return found


def numbered(text: ast.expr) -> str:
    """The template of an f-string: "depth {1} is outside what this model has"."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    values = itertools.count(1)
    return "".join(str(p.value) if isinstance(p, ast.Constant) else f"{{{next(values)}}}" for p in parts)


def of_the_bundled_workflows() -> set[str]:
    """How their titles end, lines of their notes, and titles of frames and of nodes that are no names of types."""
    found = {re.sub("^.*(?=, faster)", "", workflows.template(name)) for name in workflows.names()}
    for graph in map(workflows.ui, workflows.names()):
        names = graph["extra"]["resolute"]["names"]
        found |= {group["title"] for group in graph["groups"]}
        for node in graph["nodes"]:
            if node["title"] != names[node["type"]]:
                found.add(node["title"])
            if node["type"] == workflows.NOTE:
                found |= set(node["widgets_values"][0].splitlines())
    return {text for text in found if re.search("[a-z]{3}", text)}


def structure(value: Any) -> Any:
    """The keys of nested objects without their texts."""
    return {key: structure(each) for key, each in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_text_that_people_read_is_translated_with_its_values(language: str) -> None:
    panel = {text for path in WEB.glob("*.js") for text in re.findall(r'\bt\(\s*"([^"]+)"', path.read_text("utf-8"))}
    server, bundled = of_the_server(), of_the_bundled_workflows()
    assert min(len(panel), len(server), len(bundled)) > 40
    errors = errors_of_the_server()
    assert len(errors) > 20
    errors |= reasons_of_the_backends()
    assert (panel | server | errors | bundled) - strings(language).keys() == set()
    for english, text in strings(language).items():
        assert text and sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", text)), english


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_setting_and_each_text_of_a_node_is_translated(language: str) -> None:
    for name in ("main", "nodeDefs", "settings"):
        assert structure(locale(language, name)) == structure(locale("zh", name))
        assert '""' not in json.dumps(locale(language, name))
    settings = set(re.findall(r'"(Resolute\.\w+)"', (WEB / "settings.js").read_text("utf-8")))
    assert set(locale(language, "settings")) == {name.replace(".", "_") for name in settings}
    assert {name.partition(".")[2] for name in settings} - set(locale(language, "main")["settingsCategories"]) == set()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("page", sorted((WEB / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_each_help_page_is_translated_whole(page: Path, language: str) -> None:
    english = page.read_text("utf-8")
    translated = (page.with_suffix("") / f"{language}.md").read_text("utf-8")
    assert translated.startswith(f"# {locale(language, 'nodeDefs')[page.stem]['display_name']}\n")
    assert translated.count("\n## ") == english.count("\n## ")
    assert {name for name in re.findall(r"^- `(\w+)`", english, re.MULTILINE) if f"`{name}`" not in translated} == set()
    assert re.findall(r"\]\((images/\S+)\)", translated) == re.findall(r"\]\((images/\S+)\)", english)
