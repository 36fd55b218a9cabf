"""The runs on a GPU: every command line is one that its benchmark takes, and a run ends in time and goes on later."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan
from benchmarks.scenarios import STEPS, Step
from scripts.places import ROOT

from ...programs import command_module


class Parsed(Exception):
    """The command line is right; what would follow needs a GPU."""


@pytest.fixture
def parses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only(self: argparse.ArgumentParser, *given: Any) -> Any:
        raise Parsed(parse(self, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only)


def main_of(command: tuple[str, ...]) -> Any:
    if command[0] == "-m":
        return importlib.import_module(command[1]).main
    return command_module(command[0]).main


@pytest.mark.usefixtures("parses_only")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_benchmark_takes_the_command_line_of_its_step(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = step.arguments(tmp_path / "results", tmp_path / "models", 90.0)[1:]
    own = words[2:] if step.command[0] == "-m" else words[1:]
    monkeypatch.setattr(sys, "argv", ["program", *own])
    with pytest.raises(Parsed) as parsed:
        main_of(step.command)()
    options = vars(parsed.value.args[0])
    if not step.whole:
        assert options["out"] == tmp_path / "results" / f"{step.name}.json"
        assert options["seconds"] == 90.0
    for name, folder in (("models", "models"), ("folder", "results")):
        if isinstance(options.get(name), Path):
            assert (tmp_path / folder) in (options[name], *options[name].parents)


def test_each_step_shows_a_claim() -> None:
    page = (ROOT / "docs" / "claims.md").read_text("utf-8")
    last = [line.strip("| ").rpartition("|")[2] for line in page.splitlines() if line.startswith("|")]
    named = {
        name
        for cell in last
        for steps in re.findall(r"\bsteps? ([^;]+)", cell)
        for name in re.split(r", | and ", steps)
    }
    assert {name.strip() for name in named} == {step.name for step in STEPS}


def test_names_are_unique() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)


# --- a run ----------------------------------------------------------------------------------------------------------


def step(name: str, code: str, seconds: int = 1, whole: bool = False) -> Step:
    return Step(name, ("-c", code), seconds, "a test", 0, whole)


def noted(folder: Path) -> dict[str, bool]:
    return {name: each["done"] for name, each in json.loads((folder / "plan.json").read_text("utf-8")).items()}


def test_a_step_that_left_something_out_goes_on_and_a_done_one_does_not(tmp_path: Path) -> None:
    count = "import pathlib, sys; p = pathlib.Path({!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    files = [tmp_path / name for name in ("done", "left", "failed")]
    steps = [
        step("done", count.format(str(files[0])) + "; print('all of it')"),
        step("left", count.format(str(files[1])) + "; print('1024x1024: left out, 3 s are left')"),
        step("failed", count.format(str(files[2])) + "; sys.exit(2)"),
    ]
    for _ in range(2):
        assert plan.run(steps, tmp_path, tmp_path / "models", 120) == 1
    assert noted(tmp_path) == {"done": True, "left": False, "failed": False}
    assert [len(file.read_text()) for file in files] == [1, 2, 2]
    assert "all of it" in (tmp_path / "done.log").read_text("utf-8")


def test_a_result_with_a_failed_cell_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"failed": {"512x512": "out of memory"}, "rows": []}), "utf-8")
    plan.run([step("one", "print(1)")], tmp_path, tmp_path / "models", 120)
    assert noted(tmp_path) == {"one": False}


def test_nothing_begins_that_cannot_fit(tmp_path: Path) -> None:
    steps = [step("whole", "print(1)", seconds=500, whole=True), step("part", "print(2)", seconds=500)]
    plan.run(steps, tmp_path, tmp_path / "models", 120)
    assert noted(tmp_path) == {"part": True}
    plan.run([step("late", "print(3)")], tmp_path, tmp_path / "models", 30)
    assert noted(tmp_path) == {"part": True}


def test_what_is_left_of_a_step_is_expected_of_it() -> None:
    spent = {"done": False, "seconds": 80.0}
    part, whole = step("part", "", seconds=200), step("whole", "", seconds=200, whole=True)
    assert plan.expected(part, {"part": spent}) == 120
    assert plan.expected(part, {"part": {**spent, "seconds": 199.0}}) == plan._LEAST
    assert plan.expected(whole, {"whole": spent}) == 200
    assert plan.expected(whole, {"whole": {**spent, "seconds": 190.0}}) == 1.25 * 190


def test_the_seconds_of_a_step_are_those_of_all_its_calls(tmp_path: Path) -> None:
    left = step("left", "print('1024x1024: left out')", seconds=100)
    (tmp_path / "plan.json").write_text(json.dumps({"left": {"done": False, "seconds": 30.0}}), "utf-8")
    plan.run([left], tmp_path, tmp_path / "models", 120)
    entry = json.loads((tmp_path / "plan.json").read_text("utf-8"))["left"]
    assert entry["seconds"] >= 30.0
    assert not entry["done"]


def test_a_step_whose_models_have_no_room_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: argparse.Namespace(free=20e9))
    plan.run([step("large", "print(1)")._replace(gb=30)], tmp_path, tmp_path / "models", 120)
    assert not (tmp_path / "plan.json").exists()
    assert "-- large: not begun, its models need 30 GB of disk" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no process groups")
def test_a_step_that_takes_too_long_ends_with_its_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_SPARE", 0.2)
    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\nprint('began', flush=True)\ntime.sleep(600)\n"
    )
    log = tmp_path / "log"
    code_of_exit, _ = plan.play(step("long", code), [sys.executable, "-c", code], log, 3.0)
    assert code_of_exit == 124
    assert log.read_text("utf-8") == "began\n"
    process, deadline = int(child.read_text()), time.monotonic() + 30
    while _is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_alive(process)


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_largest_models_go_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / f"resolute-random-{name}.safetensors" for name in ("small", "large")}
    for name, size in (("small", 1), ("large", 5)):
        files[name].write_bytes(b"x" * size)
        files[name].with_suffix(".json").write_text("{}", "utf-8")
    free = lambda folder: argparse.Namespace(free=20e9 if files["large"].exists() else 40e9)  # noqa: E731
    monkeypatch.setattr(plan.shutil, "disk_usage", free)
    assert plan.make_room(tmp_path, 10)
    assert files["large"].exists()
    assert plan.make_room(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        files["small"].with_suffix(".json").name,
        files["small"].name,
    ]
