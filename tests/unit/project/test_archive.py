"""The archive that the registry ships: it holds the commands that users need, and they start from it alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...archive import ROOT, git, shipped, unpack
from .test_architecture import reached

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMANDS = ("scripts/warm-up", "scripts/bundle", "scripts/fleet")
LEFT_OUT = ("tests", "benchmarks", "typings", ".ci", ".github", "scripts/demo", "scripts/models", "scripts/setup")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("custom_nodes") / "resolute")


def started(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the archive, with the standard library alone, no settings and another working folder."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(unpacked / arguments[0]), *arguments[1:]],
        cwd=unpacked.parent,
        env={"SYSTEMROOT": "C:\\Windows"} if sys.platform == "win32" else {},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_git_and_every_comfy_cli_read_the_list_alike() -> None:
    assert shipped("gitwildmatch") == shipped("gitignore")  # names of older and newer pathspecs, which differ in `*`
    ignored = set(git("ls-files", "--cached", "--ignored", f"--exclude-from={ROOT / '.comfyignore'}"))
    assert {path for path in git("ls-files") if (ROOT / path).is_file()} - ignored == shipped()


def test_it_has_what_the_commands_of_users_import_and_nothing_that_only_a_clone_needs() -> None:
    assert [path for path in shipped() if path.startswith(LEFT_OUT)] == []
    paths = {path for path in shipped() if path.startswith("scripts/")}
    needed = {path for path in reached(*COMMANDS) if path.startswith("scripts/")}
    packages = {f"{folder}/__init__.py" for folder in {path.rpartition("/")[0] for path in needed}}
    assert paths == needed | packages


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_that_users_need_start(unpacked: Path, command: str) -> None:
    done = started(unpacked, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {command}")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("scripts/warm-up", "missing.json"), "missing.json cannot be read"),
        (("scripts/bundle", "show", "missing.bundle"), "missing.bundle"),
        (("scripts/bundle", "export", "file", "--comfyui", "nowhere"), "--comfyui must name ComfyUI's folder"),
        (("scripts/fleet", "status", "--folder", "nowhere"), "No fleet that"),
    ],
)
def test_they_answer_with_a_sentence(unpacked: Path, arguments: tuple[str, ...], answer: str) -> None:
    done = started(unpacked, *arguments)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert answer in done.stderr


def test_the_readme_links_to_what_is_shipped() -> None:
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", (ROOT / "README.md").read_text("utf-8"))
    assert links and [link for link in links if link not in shipped()] == []


def test_the_security_checks_of_the_registry_find_nothing(unpacked: Path) -> None:
    rules = "S102,S307,E702"  # exec, eval, several statements on a line
    options = ["--isolated", "--ignore-noqa", "--no-cache", "--select", rules]
    command = [sys.executable, "-m", "ruff", "check", *options, str(unpacked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    files = [path for path in unpacked.rglob("*") if path.suffix == ".py" or path.parent.name == "scripts"]
    installing = re.compile(r"[\"']pip3?[\"']|import pip\b|ensurepip|uv pip")
    assert [path for path in files if path.is_file() and installing.search(path.read_text("utf-8"))] == []


def test_the_metadata_follow_the_rules_of_the_registry() -> None:
    """docs.comfy.org/registry/specifications, and what `comfy node validate` checks."""
    metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project, comfy = metadata["project"], metadata["tool"]["comfy"]
    assert re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9])*", project["name"]) and "comfyui" not in project["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])
    assert list(project["urls"]) == ["Repository"] and project["urls"]["Repository"].startswith("https://github.com/")
    assert re.fullmatch(r"[a-z0-9-]+", comfy["PublisherId"]) and comfy["DisplayName"].strip()
    assert {project["license"]["file"], project["readme"], "requirements.txt"} <= shipped()
    newest = re.search(
        r"^## \[(.+?)\] - (Unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    )
    assert newest is not None and newest[1] == project["version"]
