"""Workflows, hooks and templates: they parse, they run commands that exist, and all that `.ci/run` runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # one of ComfyUI's requirements

from scripts.commands import shards
from scripts.setup.environment import NEWEST_PYTHON, OLDEST_PYTHON

from .documentation import ROOT, wrong_with

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
CHECKS, RUN = ROOT / ".ci" / "checks", ROOT / ".ci" / "run"
SHARD = "${{ matrix.shard }}"


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text("utf-8"))


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in read(workflow)["jobs"].values():
        yield from job["steps"]


def commands(workflow: str) -> list[str]:
    return [step["run"] for step in steps(ROOT / ".github" / "workflows" / workflow) if "run" in step]


def checks_of_ci() -> list[str]:
    """The tools that `.ci/checks` starts: "ruff check"."""
    return re.findall(r'^"\$python" -m (.+?)(?: \.)?$', CHECKS.read_text("utf-8"), re.MULTILINE)


def name_of(file: Path) -> str:
    return file.name


def test_ci_runs_the_checks_and_the_command_of_the_readme() -> None:
    assert RUN.read_text("utf-8").splitlines()[-2:] == [".ci/checks", 'exec "${PYTHON:-python3}" scripts/test "$@"']
    assert "\nscripts/test\n" in (ROOT / "README.md").read_text("utf-8")


def test_the_workflows_run_what_ci_runs_and_the_long_tests_on_a_schedule() -> None:
    assert {file.name for file in WORKFLOWS} == {"everything.yml", "long.yml", "quick.yml"}
    assert commands("everything.yml")[0] == ".ci/checks"
    assert commands("everything.yml")[-1] == f"python scripts/test --shard {SHARD}"
    assert commands("long.yml")[-1] == f"python scripts/test --shard {SHARD} --long"
    assert commands("quick.yml") == ["python scripts/test --quick"]
    # YAML reads a bare `on` as true.
    assert "schedule" in read(ROOT / ".github" / "workflows" / "long.yml")[True]


@pytest.mark.parametrize("workflow", ["everything.yml", "long.yml"])
def test_a_workflow_has_a_job_for_each_shard(workflow: str) -> None:
    matrix = read(ROOT / ".github" / "workflows" / workflow)["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix == {"shard": shards.names()}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
class TestWorkflow:
    def test_its_commands_exist(self, workflow: Path) -> None:
        wrong = [wrong_with(command.replace(SHARD, "unit"), workflow) for command in commands(workflow.name)]
        assert [each for each in wrong if each] == []

    def test_its_actions_are_pinned_to_a_major_version(self, workflow: Path) -> None:
        used = [step["uses"] for step in steps(workflow) if "uses" in step]
        assert used
        assert [action for action in used if not re.fullmatch(r"actions/[a-z-]+@v\d+", action)] == []

    def test_it_may_only_read(self, workflow: Path) -> None:
        assert read(workflow)["permissions"] == {"contents": "read"}


def test_the_quick_tests_run_on_each_system_and_each_supported_python() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "quick.yml")["jobs"]["quick"]["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "windows-latest", "macos-latest"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)]


def test_the_commit_hooks_run_the_checks_of_ci() -> None:
    (repository,) = read(PRE_COMMIT)["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == [f".venv/bin/python -m {each}" for each in checks_of_ci()]
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_the_contributing_guide_lists_the_checks_of_ci() -> None:
    listed = re.findall(r"^\.venv/bin/python -m (.+?)(?: \.)?$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    assert len(checks_of_ci()) == 4
    assert listed == checks_of_ci()


@pytest.mark.parametrize("template", TEMPLATES, ids=name_of)
def test_a_template_is_a_form_that_github_accepts(template: Path) -> None:
    form = read(template)
    assert form.keys() == {"name", "description", "labels", "body"}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in asked} <= {"input", "textarea"}
    assert len({part["id"] for part in asked}) == len(asked)
    assert all(part["attributes"]["label"] for part in asked)


def test_a_bug_report_asks_for_what_an_answer_needs() -> None:
    form = read(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
    assert {"report", "comfyui", "command", "machine", "workflow"} <= required
