"""The archive that the registry ships: it holds the commands that users need, and they start from it alone."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pathspec  # of mypy; comfy-cli reads .comfyignore with it
import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (
    "tests", "benchmarks", "typings", ".ci", ".github", "scripts/demo", "scripts/support/demo_model",
    "scripts/support/environment.py",
)  # fmt: skip


def git(*arguments: str) -> list[str]:
    """The lines that git prints."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@functools.cache
def shipped(syntax: str = "gitignore") -> frozenset[str]:
    """The paths that `comfy node publish` would pack: tracked files that .comfyignore does not match."""
    lines = [line.strip() for line in (ROOT / ".comfyignore").read_text("utf-8").splitlines()]
    ignored = pathspec.PathSpec.from_lines(syntax, [line for line in lines if line and not line.startswith("#")])
    return frozenset(path for path in git("ls-files") if not ignored.match_file(path) and (ROOT / path).is_file())


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom_nodes") / "resolute"
    for path in shipped():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)  # without the mode: an archive may lose it
    return folder


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


@pytest.mark.parametrize("command", ["scripts/warm-up", "scripts/bundle"])
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
    ],
)
def test_they_answer_with_a_sentence(unpacked: Path, arguments: tuple[str, ...], answer: str) -> None:
    done = started(unpacked, *arguments)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert answer in done.stderr


def test_of_the_support_modules_only_imported_ones_are_shipped() -> None:
    support = {path for path in shipped() if path.startswith("scripts/support/") and not path.endswith("__init__.py")}
    text = "".join((ROOT / path).read_text("utf-8") for path in (*support, "scripts/warm-up", "scripts/bundle"))
    modules = {Path(path).stem for path in support}
    lines = re.findall(r"^from (?:scripts\.support|\.) import (.+)$", text, re.MULTILINE)
    imported = {name.strip() for line in lines for name in line.split(",")}
    imported |= set(re.findall(r"^from (?:scripts\.support)?\.(\w+) import ", text, re.MULTILINE))
    assert modules == imported


def test_the_readme_links_to_what_is_shipped() -> None:
    paths = shipped()
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    assert [link for link in links if link not in paths] == []
