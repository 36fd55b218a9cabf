"""The shards of the tests: every test file is in one of them, and they run side by side."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scripts.commands import run_shards, shards
from scripts.places import ROOT


class Process:
    """A pytest that ends with `code` once it was asked `polls` times."""

    def __init__(self, code: int, polls: int) -> None:
        self.code, self.polls, self.returncode = code, polls, None
        self.terminated = False

    def poll(self) -> int | None:
        self.polls -= 1
        self.returncode = self.code if self.polls <= 0 else None
        return self.returncode

    def terminate(self) -> None:
        self.terminated = True


class Runs:
    """Begins made-up shards and notes how many ran at once."""

    def __init__(self, folder: Path, codes: dict[str, int] | None = None, polls: dict[str, int] | None = None) -> None:
        self.folder, self.codes, self.polls = folder, codes or {}, polls or {}
        self.begun: list[run_shards.Running] = []
        self.most = 0

    def begin(self, name: str) -> run_shards.Running:
        log = self.folder / name
        log.write_text(f"== {name} ends ==\n", "utf-8")
        process = Process(self.codes.get(name, 0), self.polls.get(name, 1))
        self.begun.append(run_shards.Running(name, process, log, time.monotonic()))  # type: ignore[arg-type]
        self.most = max(self.most, sum(each.process.returncode is None for each in self.begun))
        return self.begun[-1]

    def run(self, *names: str, missing: tuple[str, ...] = ()) -> int:
        reason = dict.fromkeys(missing, "It lacks something.")
        return run_shards.run(names, reason.get, self.begin, wait=0.0)


def test_together_they_are_every_test_file_once() -> None:
    files = [file for name in shards.names() for file in shards.files_of(name)]
    gpu = ROOT / "tests" / "gpu"  # needs hardware, so it is in no shard
    every = [file for file in (ROOT / "tests").rglob("test_*.py") if not file.is_relative_to(gpu)]
    assert sorted(files) == sorted(every)
    assert [name for name in shards.names() if not shards.files_of(name)] == []


def test_the_slowest_files_are_dealt_first_each_to_the_shard_with_least() -> None:
    took = {"a": 30.0, "b": 20.0, "c": 15.0, "e": 1.0}  # d is not in the table: 10
    assert shards.deal("abcde", took, 2) == [["a", "d"], ["b", "c", "e"]]
    assert shards.deal("edcba", took, 2) == shards.deal("abcde", took, 2)


def test_the_seconds_of_a_file_are_read_from_a_junit_file(tmp_path: Path) -> None:
    case = '<testcase classname="tests.unit.scripts.{}" name="test" time="{}" />'
    cases = case.format("test_shards.TestOne", 1.5) + case.format("test_shards", 2) + case.format("test_gone", 4)
    report = tmp_path / "unit.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", "utf-8")
    assert shards.measured(report) == {"tests/unit/scripts/test_shards.py": 3.5}


class TestRunning:
    def test_two_run_at_a_time_and_each_log_is_printed_when_it_ends(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs = Runs(tmp_path, polls={"a": 5})
        assert runs.run("a", "b", "c") == 0
        assert runs.most == 2
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("==")] == [f"== {name} ends ==" for name in "bca"]

    def test_a_failure_is_named_and_the_others_still_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert Runs(tmp_path, codes={"a": 2}).run("a", "b", "c") == 1
        out = capsys.readouterr().out
        assert "a FAILED with exit code 2; `scripts/test --shard a` repeats it" in out
        assert "b passed" in out
        assert out.endswith("== c ends ==\n")

    def test_what_the_machine_lacks_is_said_and_fails_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs = Runs(tmp_path)
        assert runs.run("a", "b", missing=("a",)) == 0
        assert [each.name for each in runs.begun] == ["b"]
        assert "NOT RUN: the tests of a. It lacks something.\n" in capsys.readouterr().out

    def test_what_still_runs_is_ended_if_the_command_is_interrupted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(run_shards.time, "sleep", interrupt)
        runs = Runs(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            runs.run("a", "b", "c")
        assert [each.process.terminated for each in runs.begun] == [True, True]  # type: ignore[attr-defined]
