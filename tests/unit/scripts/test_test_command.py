"""`scripts/test`: what each option runs, and that the whole suite says what cannot run here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scripts.errors import SetupError
from scripts.places import ROOT
from scripts.setup import comfyui

from ...programs import command_module

SOME = "tests/unit/test_keys.py"


@pytest.fixture
def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """`scripts/test` as a module, with an environment that is there."""
    module = command_module("scripts/test")
    ready = SimpleNamespace(python=Path(sys.executable), comfyui=ROOT)
    monkeypatch.setattr(module.command, "prepare", lambda versions=(): ready)
    monkeypatch.setattr(module.shards, "REPORTS", tmp_path)
    return module


def test_a_missing_test_folder_is_an_error(
    test_command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, _ = test_command.parse(["--", "-x"])
    assert test_command.chosen_tests(options) == ["tests/unit", "tests/contract", "tests/comfy"]
    monkeypatch.setattr(test_command, "ROOT", tmp_path)
    with pytest.raises(SetupError, match="is missing"):
        test_command.chosen_tests(options)


OPTIONS = [
    ("--quick", "unit", "not long"), ("--gpu", "gpu", "not long"), ("--browser", "browser", "not long"),
    ("--oldest-torch", "contract", "not long"), ("--newest-torch", "contract", "not long"),
    ("--old", "comfy", "old and not long"), ("--newest --long", "comfy", "not old"), ("--gpu --long", "gpu", None),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "folder", "marks"), OPTIONS)
def test_an_option_runs_only_its_folder_and_long_tests_only_if_they_are_asked_for(
    test_command: ModuleType, flags: str, folder: str, marks: str | None
) -> None:
    options, passed = test_command.parse([*flags.split(), "--", "-x"])
    assert (test_command.chosen_tests(options), passed) == ([f"tests/{folder}"], ["-x"])
    assert test_command.marker(options) == ([] if marks is None else ["-m", marks])


def test_the_tests_of_a_gpu_and_named_ones_need_no_second_comfyui(
    test_command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a GPU and without a network has one checkout."""
    asked: list[tuple[str, ...]] = []
    ready = SimpleNamespace(python=Path(sys.executable), comfyui=ROOT)
    monkeypatch.setattr(test_command.command, "prepare", lambda *versions: asked.append(*versions or ((),)) or ready)
    for arguments in (["--gpu"], ["--", SOME], ["--quick"]):
        test_command.ready_python(test_command.parse(arguments)[0])
    assert asked == [(), (), (comfyui.TARGET, comfyui.OLDEST)]


class TestShard:
    def test_it_runs_its_files_in_its_environment_and_writes_a_junit_file(
        self, test_command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(test_command.environment, "ensure_fleet", lambda root: Path("python-of-the-fleet"))
        older = tmp_path / "fleet.xml"
        older.touch()
        options, passed = test_command.parse(["--shard", "fleet", "--long", "--", "-x"])
        pytest_command, variables = test_command.pytest_of(options, passed)
        files = sorted(str(file.relative_to(ROOT).as_posix()) for file in (ROOT / "tests" / "fleet").glob("test_*.py"))
        assert pytest_command == ["python-of-the-fleet", "-m", "pytest", *files, f"--junitxml={older}", "-x"]
        assert not older.exists()
        assert variables["RESOLUTE_COMFYUI_PYTHON"] == sys.executable

    @pytest.mark.parametrize("others", [["--quick"], ["--fleet"], ["--", SOME]])
    def test_it_cannot_be_combined_with_other_tests(self, test_command: ModuleType, others: list[str]) -> None:
        with pytest.raises(SystemExit):
            test_command.parse(["--shard", "fleet", *others])


class TestOneProcess:
    def test_it_runs_every_file_once_in_an_order_that_its_seed_repeats(
        self, test_command: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, again, other = (
            test_command.chosen_tests(test_command.parse(["--one-process", "--seed", seed])[0]) for seed in "335"
        )
        assert first == again != other
        assert "`scripts/test --one-process --seed 3` repeats it" in capsys.readouterr().out
        folders = (ROOT / "tests" / folder for folder in ("unit", "contract", "comfy"))
        assert sorted(ROOT / file for file in first) == sorted(
            file for each in folders for file in each.rglob("test_*.py")
        )

    def test_it_draws_a_seed_if_it_gets_none(self, test_command: ModuleType) -> None:
        assert len({test_command.parse(["--one-process"])[0].seed for _ in range(20)}) > 1


class TestWhole:
    Start = Callable[..., dict[str, Any]]

    @pytest.fixture
    def start(self, test_command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Start:
        """What a run starts, on a machine without Python 3.10 that can have every other environment."""
        started: dict[str, Any] = {}

        def run(commands: dict[str, Any], notes: list[str], failures: list[str]) -> int:
            started.update(commands=commands, notes=notes, failures=failures)
            return 0

        def start(*flags: str) -> dict[str, Any]:
            monkeypatch.setattr(sys, "argv", ["scripts/test", *flags])
            assert test_command.main() == 0
            return started

        one = SimpleNamespace(wait=lambda: 0)
        runner = SimpleNamespace(run=run, start=lambda *_: one, end=lambda _: None, be_interrupted=lambda: None)
        monkeypatch.setattr(test_command, "run_shards", runner)
        monkeypatch.setattr(test_command.environment, "find_oneflow_python", lambda: None)
        monkeypatch.setattr(test_command.environment, "ensure_fleet", lambda root: Path(sys.executable))
        monkeypatch.setattr(test_command.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
        return start

    def test_without_options_every_shard_runs_and_what_cannot_is_said(
        self, test_command: ModuleType, start: Start, capsys: pytest.CaptureFixture[str]
    ) -> None:
        started = start()
        assert [*started["commands"]] == [name for name in test_command.shards.names() if name != "oneflow"]
        note = "NOT RUN: the tests of oneflow. They need a Python 3.10, and there is none on this machine."
        assert (started["notes"], started["failures"]) == ([note], [])
        assert note in capsys.readouterr().out
        assert all("not long" in arguments for arguments, _ in started["commands"].values())
        assert not any("not long" in arguments for arguments, _ in start("--long")["commands"].values())

    def test_quick_runs_those_of_the_unit_tests_and_arguments_for_pytest_start_one(self, start: Start) -> None:
        assert start("--quick", "--", "-x") == {}
        started = start("--quick")
        assert ([*started["commands"]], started["notes"]) == (["unit-1", "unit-2"], [])

    def test_an_environment_that_cannot_be_made_is_a_failure_and_the_others_run(
        self, test_command: ModuleType, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(root: Path) -> Path:
            raise SetupError("no network")

        monkeypatch.setattr(test_command.environment, "ensure_fleet", fail)
        started = start()
        assert started["failures"] == ["fleet: no network"]
        assert {"unit-1", "fleet"} & set(started["commands"]) == {"unit-1"}


@pytest.mark.parametrize(
    ("flag", "why"), [("--gpu", "torch finds no NVIDIA GPU here."), ("--browser", "There is no Chromium on PATH.")]
)
def test_tests_that_were_asked_for_and_cannot_run_are_an_error(
    test_command: ModuleType, flag: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_command.environment, "has_cuda", lambda python: False)
    done = SimpleNamespace(returncode=1, stdout="There is no Chromium on PATH.\n")
    monkeypatch.setattr(test_command.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(test_command.sys, "argv", ["scripts/test", flag])
    monkeypatch.setattr(test_command.run_shards, "be_interrupted", lambda: None)
    with pytest.raises(SetupError, match=f"cannot run: {why}"):
        test_command.main()
