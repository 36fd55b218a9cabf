"""The shards of the tests: every test file is in one of them, they run side by side, and their outcomes are summed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from scripts.commands import run_shards, shards
from scripts.places import ROOT

CASE = '<testcase classname="tests.unit.scripts.{}" name="test" time="{}">{}</testcase>'
SUITE = "<testsuites><testsuite>{}</testsuite></testsuites>"
LINE = "tests/unit/test_keys.py::test_a[b::c 50%] PASSED                         [ 50%]\n"
ENDS = "== 1 passed in 0.10s =="


class Process:
    """A pytest that ends with `code` once it was asked `polls` times."""

    def __init__(self, code: int, polls: int) -> None:
        self.code, self.polls, self.returncode = code, polls, None

    def poll(self) -> int | None:
        self.polls -= 1
        self.returncode = self.code if self.polls <= 0 else None
        return self.returncode


class Runs:
    """Begins made-up shards, each with a log and a report, and notes how many ran at once."""

    def __init__(self, folder: Path, polls: dict[str, int] | None = None) -> None:
        self.folder, self.polls = folder, polls or {}
        self.codes: dict[str, int] = {}
        self.reports: dict[str, str | None] = {}  # None: pytest got no further
        self.begun: list[run_shards.Shard] = []
        self.most = 0

    def begin(self, name: str, command: run_shards.Command) -> run_shards.Shard:
        assert command == ([name], {})
        report = self.reports.get(name, SUITE.format(CASE.format("test_shards", 1, "")))
        if report is not None:
            shards.report_of(name).write_text(report, "utf-8")
        (self.folder / f"{name}.log").write_text(f"{LINE}== FAILURES ==\n{name} ends\n{ENDS}\n", "utf-8")
        process = Process(self.codes.get(name, 0), self.polls.get(name, 1))
        self.begun.append(run_shards.Shard(name, process, time.monotonic()))  # type: ignore[arg-type]
        self.most = max(self.most, sum(each.process.returncode is None for each in self.begun))
        return self.begun[-1]

    def run(self, *names: str, notes: tuple[str, ...] = (), failures: tuple[str, ...] = ()) -> int:
        commands = {name: ([name], {}) for name in names}
        return run_shards.run(commands, notes, failures, begin=self.begin, wait=0.0)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Of shards a, b, ... that leave their logs in a folder of their own."""
    monkeypatch.setattr(shards, "REPORTS", tmp_path)
    return Runs(tmp_path)


def test_together_they_are_every_test_file_once() -> None:
    files = [ROOT / file for name in shards.names() for file in shards.files_of(name)]
    gpu = ROOT / "tests" / "gpu"  # needs hardware, so it is in no shard
    every = [file for file in (ROOT / "tests").rglob("test_*.py") if not file.is_relative_to(gpu)]
    assert sorted(files) == sorted(every)
    assert [name for name in shards.names() if not shards.files_of(name)] == []


class TestRunning:
    def test_two_run_at_a_time_and_each_end_is_printed_when_it_comes(
        self, runs: Runs, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs.polls = {"c": 5}
        assert runs.run("c", "b", "a") == 0
        assert [each.name for each in runs.begun] == ["c", "b", "a"]
        assert runs.most == 2
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.endswith(" ends")] == ["b ends", "a ends", "c ends"]
        assert LINE.strip() not in lines  # only the end of a log is printed
        assert [line for line in lines if line.endswith(" tests so far.")][-1] == "3 tests so far."

    def test_it_ends_with_the_sum_of_all_shards(self, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
        skipped = CASE.format("test_shards", 0, "<skipped/>")
        runs.reports["b"] = SUITE.format(skipped * 2 + CASE.format("test_shards", 0, ""))
        assert runs.run("a", "b", notes=("NOT RUN: the tests of c. It lacks something.",)) == 0
        *_, note, last = capsys.readouterr().out.splitlines()
        assert note == "NOT RUN: the tests of c. It lacks something."
        assert last == "2 passed, 0 failed, 2 skipped"

    def test_a_failure_is_named_at_the_end_and_the_others_still_run(
        self, runs: Runs, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs.codes["b"] = 1
        runs.reports["b"] = SUITE.format(CASE.format("test_shards", 1, "<failure/>"))
        assert runs.run("a", "b") == 1
        out = capsys.readouterr().out
        assert "b: 0 passed, 1 failed, 0 skipped in 0 s. `scripts/test --shard b` repeats it." in out
        assert out.endswith("FAILED: tests.unit.scripts.test_shards::test\n1 passed, 1 failed, 0 skipped\n")

    @pytest.mark.parametrize(
        ("code", "report", "last"),
        [
            (-11, None, "1 passed, 1 failed, 0 skipped"),
            (0, None, "1 passed, 1 failed, 0 skipped"),
            (2, "<testsuites><test", "1 passed, 1 failed, 0 skipped"),
            (5, SUITE.format(""), "1 passed, 1 failed, 0 skipped"),
            (3, SUITE.format(CASE.format("test_shards", 1, "")), "2 passed, 1 failed, 0 skipped"),
        ],
        ids=["without a report", "silently", "in its report", "without tests", "after its tests"],
    )
    def test_a_pytest_that_crashed_is_a_failure(
        self, runs: Runs, capsys: pytest.CaptureFixture[str], code: int, report: str | None, last: str
    ) -> None:
        runs.codes["b"], runs.reports["b"] = code, report
        assert runs.run("a", "b") == 1
        assert capsys.readouterr().out.endswith(f"FAILED: pytest of b crashed with exit code {code}\n{last}\n")

    def test_what_failed_before_counts(self, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
        assert runs.run("a", failures=("fleet: no network",)) == 1
        assert capsys.readouterr().out.endswith("FAILED: fleet: no network\n1 passed, 1 failed, 0 skipped\n")

    def test_a_shard_is_a_process_with_its_variables_and_its_output_in_a_file(
        self, runs: Runs, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = f"import os, pathlib; print('wrote', os.environ['NAME']); pathlib.Path({str(shards.report_of('a'))!r})"
        code += f".write_text({SUITE.format(CASE.format('test_shards', 1, ''))!r})"
        assert run_shards.run({"a": ([sys.executable, "-c", code], {**os.environ, "NAME": "it"})}, wait=0.01) == 0
        assert (runs.folder / "a.log").read_text("utf-8") == "wrote it\n"
        assert capsys.readouterr().out.endswith("1 passed, 0 failed, 0 skipped\n")
