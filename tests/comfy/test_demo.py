"""The demo command: a real run of it, and its verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from scripts.demonstration.machine import Machine
from scripts.demonstration.plan import Job, make_plan, prompt_for
from scripts.demonstration.report import Verdict, judge
from scripts.demonstration.run import COUNTED, PromptRun, Row
from scripts.models.demo_model import captions
from scripts.places import ROOT, inductor_cache

STEPS = 3
INDUCTOR = Machine("cpu", "CPU", "2.11.0", "inductor", "inductor")
NO_COMPILER = Machine("cpu", "CPU", "2.11.0", "eager", "eager (not inductor: there is no C++ compiler)")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One run of ``scripts/demo --quick`` on the CPU."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "scripts" / "demo"), "--cpu", "--quick", "--steps", str(STEPS)]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(inductor_cache()), **os.environ, "RESOLUTE_PYTHON": sys.executable}
    del environment["TORCHINDUCTOR_VEC_ISA_OK"]  # as for a user: inductor finds the vector instructions itself
    done = subprocess.run(
        [*command, "--output", str(folder / "images")],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "workflow" in done.stdout, done.stdout + done.stderr
    return done


def test_the_demo_passes_and_ends_with_its_verdict(demo: subprocess.CompletedProcess[str]) -> None:
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.splitlines()[-1].startswith("PASSED: ")


def test_the_demo_covers_odd_sizes_batches_and_long_prompts(demo: subprocess.CompletedProcess[str]) -> None:
    rows = re.findall(r"^sd15_text_to_image +(\d+x\d+) +(\d+) +(\d+) ", demo.stdout, re.MULTILINE)
    sizes, batches, tokens = (set(column) for column in zip(*rows, strict=True))
    assert len(sizes) >= 4
    assert "264x200" in sizes
    assert batches == {"1", "2", "3"}
    assert tokens == {"8", "12"}


def a_run(**counters: Any) -> PromptRun:
    usual = {**dict.fromkeys(COUNTED, 0), "graph_calls": STEPS + 1, "bypasses": {}}
    return PromptRun(1, 1.0, {**usual, **counters})


def two_rows(**second: Any) -> list[Row]:
    """A first row that compiles, and a second row whose first prompt has the given counters."""
    runs = [[a_run(region_compiles=15), a_run()], [a_run(**second), a_run()]]
    jobs = make_plan(quick=True).jobs
    image = [Path("image.png")]
    return [Row(job, [a_run()] * 2, own, image, image, 1) for job, own in zip(jobs, runs, strict=False)]


def verdict_on(rows: list[Row], machine: Machine = INDUCTOR) -> Verdict:
    return judge(rows, machine, STEPS, ["patched_block: another node patches attn1"])


def test_the_verdict_passes_a_right_run() -> None:
    assert verdict_on(two_rows()).passed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"region_compiles": 1}, "1 regions compiled after the first prompt .*264x200"),
        ({"graph_calls": STEPS}, "264x200.* 3 forwards ran compiled .at least 4"),
        ({"eager_calls": 1}, "1 ran eagerly"),
        ({"compile_failures": 1}, "1 compiles failed"),
        ({"bypasses": {"patched_block": 2}}, "bypassed: patched_block: another node patches attn1"),
        ({"bypasses": {"gradient": 1}}, "bypassed: gradient"),
    ],
)
def test_the_verdict_fails_with_the_reason(change: dict[str, Any], expected: str) -> None:
    verdict = verdict_on(two_rows(**change))
    assert not verdict.passed
    assert verdict.sentence.startswith("FAILED: ")
    assert re.search(expected, verdict.sentence), verdict.sentence


@pytest.mark.parametrize(("prompt", "passed"), [(0, True), (1, False)])
def test_only_the_first_prompt_that_encodes_a_picture_may_compile_too(prompt: int, passed: bool) -> None:
    rows = two_rows()
    rows[1].compiled[prompt] = a_run(region_compiles=4)
    assert not verdict_on(rows).passed
    encoding = Row(Job("image_to_image", ((264, 200),)), *(getattr(rows[1], part.name) for part in fields(Row)[1:]))
    verdict = verdict_on([rows[0], encoding])
    assert verdict.passed is passed
    assert not passed or "15 regions compiled in the first prompt and 4 in the first that encodes" in verdict.sentence


def test_the_verdict_fails_if_the_first_prompt_compiled_nothing() -> None:
    rows = two_rows()
    rows[0].compiled[0] = a_run()
    assert "the first prompt compiled nothing" in verdict_on(rows).sentence


def test_a_wrong_image_fails_on_the_cpu_and_is_only_reported_on_cuda() -> None:
    rows = two_rows()
    rows[1].max_error = 2
    assert "differs from eager by 2 of 255" in verdict_on(rows).sentence
    assert "at most 2 of 255" in verdict_on(rows, Machine("cuda", "GPU", "2.11.0", "inductor", "inductor")).sentence


def test_without_a_compiler_the_verdict_says_that_nothing_was_compiled() -> None:
    rows = two_rows()
    for row in rows:
        row.compiled = [a_run(graph_calls=0, eager_calls=STEPS + 1)] * 2
    verdict = verdict_on(rows, NO_COMPILER)
    assert verdict.passed
    assert "Nothing was compiled here" in verdict.sentence
    assert "there is no C++ compiler" in verdict.sentence


def test_every_bundled_workflow_is_run_or_left_out_with_a_reason() -> None:
    bundled = {path.stem for path in (ROOT / "workflows" / "api").glob("*.json")}
    plan = make_plan(quick=False)
    run = {job.workflow for job in plan.jobs}
    assert run == {"sd15_text_to_image", "image_to_image", "compare_with_stock", "deepcache", "resolution_tour"}
    assert run | set(plan.left_out) == bundled
    assert not run & set(plan.left_out)
    assert len({job.name for job in plan.jobs}) == len(plan.jobs)


def test_the_bundled_models_prompts_differ_from_the_workflows_only_in_loader_and_captions() -> None:
    for job in make_plan(quick=False).jobs:
        prompt = prompt_for(job, None, None, seed=1, steps=STEPS)
        kinds = [node["class_type"] for node in prompt.values()]
        assert kinds.count("ResoluteDemoModel") == 1
        assert not {"CheckpointLoaderSimple", "ResoluteLoadCheckpoint"} & set(kinds)
        assert "ResoluteCompileModel" in kinds
        encodes = "VAEEncode" in kinds
        assert ("ResoluteCompileVAE" in kinds, "ResoluteCompileVAEDecode" in kinds) == (encodes, not encodes)
        for node in prompt.values():
            links = [value for value in node["inputs"].values() if isinstance(value, list)]
            assert all(link[0] in prompt for link in links)
        positive, negative = (
            captions.numbers(prompt[link]["inputs"]["text"])
            for link in next(
                (node["inputs"]["positive"][0], node["inputs"]["negative"][0])
                for node in prompt.values()
                if node["class_type"] == "KSampler"
            )
        )
        assert sum(map(len, positive)) == job.tokens
        assert negative == [captions.NOTHING]
