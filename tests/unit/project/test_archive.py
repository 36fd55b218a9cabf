"""The archive that the registry ships: it holds the commands that users need, and they start from it alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ...archive import ROOT, git, shipped, unpack
from .test_scripts_layout import imported_scripts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEFT_OUT = (
    "tests", "benchmarks", "typings", ".ci", ".github", "scripts/demo", "scripts/models", "scripts/setup",
    "scripts/workflows",
)  # fmt: skip


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("custom_nodes") / "resolute")


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        found: dict[str, Any] = tomllib.load(file)
    return found


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


def test_what_only_a_clone_needs_is_left_out() -> None:
    assert [path for path in shipped() if path.startswith(LEFT_OUT)] == []


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_git_and_every_comfy_cli_read_the_list_alike() -> None:
    assert shipped("gitwildmatch") == shipped("gitignore")  # names of older and newer pathspecs, which differ in `*`
    ignored = set(git("ls-files", "--cached", "--ignored", f"--exclude-from={ROOT / '.comfyignore'}"))
    assert {path for path in git("ls-files") if (ROOT / path).is_file()} - ignored == shipped()


@pytest.mark.parametrize("command", ["scripts/warm-up", "scripts/bundle", "scripts/fleet"])
def test_the_commands_that_users_need_start(unpacked: Path, command: str) -> None:
    done = started(unpacked, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {command}")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("scripts/warm-up", "missing.json"), "missing.json cannot be read"),
        (("scripts/bundle", "show", "missing.bundle"), "missing.bundle"),
        (("scripts/fleet", "status", "--folder", "nowhere"), "No fleet that"),
        (("scripts/bundle", "export", "file", "--comfyui", "nowhere"), "--comfyui must name ComfyUI's folder"),
    ],
)
def test_they_answer_with_a_sentence(unpacked: Path, arguments: tuple[str, ...], answer: str) -> None:
    done = started(unpacked, *arguments)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert answer in done.stderr


def test_of_the_modules_of_scripts_only_imported_ones_are_shipped() -> None:
    paths = {path for path in shipped() if path.startswith("scripts/") and "/deploy/" not in path}
    reached = {"scripts/warm-up", "scripts/bundle", "scripts/fleet"}
    queue = sorted(reached)
    while queue:
        found = imported_scripts(ROOT / queue.pop()) - reached
        reached |= found
        queue += found
    packages = {f"{folder}/__init__.py" for folder in {path.rpartition("/")[0] for path in reached}}
    assert paths == reached | packages


def test_the_readme_links_to_what_is_shipped() -> None:
    paths = shipped()
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    assert [link for link in links if link not in paths] == []


class TestRulesOfTheRegistry:
    """docs.comfy.org/registry/specifications and /standards, and what `comfy node validate` checks."""

    def test_the_security_checks_find_nothing(self, unpacked: Path) -> None:
        rules = "S102,S307,E702"  # exec, eval, several statements on a line
        options = ["--isolated", "--ignore-noqa", "--no-cache", "--select", rules]
        command = [sys.executable, "-m", "ruff", "check", *options, str(unpacked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout

    def test_nothing_is_installed_at_run_time(self, unpacked: Path) -> None:
        installing = re.compile(r"[\"']pip3?[\"']|import pip\b|ensurepip|uv pip")
        files = [path for path in unpacked.rglob("*") if path.suffix == ".py" or path.parent.name == "scripts"]
        texts = {path.relative_to(unpacked).as_posix(): path.read_text("utf-8") for path in files if path.is_file()}
        assert len(texts) > 100
        assert [name for name, text in texts.items() if installing.search(text)] == []

    def test_the_name_is_a_node_id(self, metadata: dict[str, Any]) -> None:
        name = metadata["project"]["name"]
        assert re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9])*", name)
        assert len(name) < 100
        assert "comfyui" not in name

    def test_the_versions_have_three_numbers(self, metadata: dict[str, Any]) -> None:
        assert re.fullmatch(r"\d+\.\d+\.\d+", metadata["project"]["version"])
        assert re.fullmatch(r">=\d+\.\d+\.\d+", metadata["tool"]["comfy"]["requires-comfyui"])

    def test_the_changelog_begins_with_this_version(self, metadata: dict[str, Any]) -> None:
        headings = re.findall(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
        version, date = headings[0]
        assert version == metadata["project"]["version"]
        assert date == "Unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date)

    def test_what_the_metadata_names_is_shipped(self, metadata: dict[str, Any]) -> None:
        project = metadata["project"]
        assert {project["license"]["file"], project["readme"], "requirements.txt"} <= shipped()

    def test_the_publisher_and_the_name_for_people_are_given(self, metadata: dict[str, Any]) -> None:
        comfy = metadata["tool"]["comfy"]
        assert re.fullmatch(r"[a-z0-9-]+", comfy["PublisherId"])
        assert comfy["DisplayName"].strip()

    def test_an_icon_is_a_picture_of_the_allowed_size(self, metadata: dict[str, Any]) -> None:
        icon = metadata["tool"]["comfy"]["Icon"]
        if not icon:
            return  # the registry shows a plain one
        path = icon.rpartition("/main/")[2]  # an address of a file of the repository
        assert path.endswith((".svg", ".png", ".jpg", ".gif"))
        assert (ROOT / path).is_file()
        if not path.endswith(".svg"):
            with Image.open(ROOT / path) as picture:
                assert picture.width <= 800
                assert picture.height <= 400
