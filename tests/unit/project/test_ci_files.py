"""GitHub's workflows, the commit hooks and the contributing guide run what `.ci/run` runs."""

from __future__ import annotations

import re
from typing import Any

import yaml  # one of ComfyUI's requirements

from scripts.commands import shards

from .test_docs import ROOT

CHECKS = re.findall(r'^"\$python" -m (.+?)(?: \.)?$', (ROOT / ".ci" / "checks").read_text("utf-8"), re.M)


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))


def commands(name: str) -> list[str]:
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_ci_runs_the_checks_and_the_whole_suite() -> None:
    assert len(CHECKS) == 4
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert lines[-2:] == [".ci/checks", 'exec "${PYTHON:-python3}" scripts/test "$@"']


def test_the_workflows_run_the_same_with_a_job_for_each_shard() -> None:
    shard = "python scripts/test --shard ${{ matrix.shard }}"
    assert commands("everything") == [".ci/checks", shard]
    assert commands("long") == [f"{shard} --long"]
    assert commands("quick") == ["python scripts/test --quick"]
    for name in ("everything", "long"):
        assert workflow(name)["jobs"]["tests"]["strategy"]["matrix"] == {"shard": shards.names()}
        assert workflow(name)["permissions"] == {"contents": "read"}


def test_the_hooks_and_the_guide_have_the_checks() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == [f".venv/bin/python -m {each}" for each in CHECKS]
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert re.findall(r"^\.venv/bin/python -m (.+?)(?: \.)?$", guide, re.M) == CHECKS
