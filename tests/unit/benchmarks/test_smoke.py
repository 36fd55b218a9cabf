"""The smoke run: its servers, what passes and what fails, and what a run that is cut says."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import smoke
from benchmarks.rig import OURS, STOCK, commit_of
from benchmarks.smoke_checks import FAIL, NOT_RUN, PASS, checks_of
from benchmarks.smoke_rows import COLD, DECODE, LORA, QUEUE, RESTART, SIZE, START, UNLOAD, rows
from benchmarks.smoke_setup import import_bundle
from scripts.places import ROOT
from scripts.server.process import ComfyServer

from .machine import Machine

Result = dict[str, Any]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(each=0.5).serve(monkeypatch, smoke)
    monkeypatch.setattr(smoke, "time", machine)
    monkeypatch.setattr(smoke, "make_models", lambda *given: {"checkpoint": "x", "lora": "y"})
    monkeypatch.setattr(smoke.Smoke, "_measure_unload", lambda *given: {"after_unload_gib": 0.5})
    return machine


def start(folder: Path, seconds: float = 1000.0) -> tuple[int, Result]:
    out, no_paths = folder / "out.json", {"folder": None, "models": None, "argument": [], "cpu": False}
    options = argparse.Namespace(out=out, seconds=seconds, bundle=folder / "none", commit="abc", **no_paths)
    return smoke.run(options, folder), json.loads(out.read_text("utf-8"))


@pytest.fixture
def good(machine: Machine, tmp_path: Path) -> Result:
    """A whole run in which all is as it should be, with a bundle."""
    return start(tmp_path)[1] | {"bundle": {"imported": True}}


def find(result: Result, kind: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["kind"] == kind)


def verdicts(result: Result) -> set[str]:
    return {check.verdict for check in checks_of(result)}


def failed(result: Result) -> set[tuple[str, str]]:
    kinds = {row["row"]: row["kind"] for row in result["rows"]}
    return {(kinds[check.row], check.figure) for check in checks_of(result) if check.verdict == FAIL}


def more(result: Result, kind: str, number: int, **changes: float) -> None:
    """More seconds in a prompt of ours, or more of a counter."""
    prompt = find(result, kind)[OURS]["prompts"][number]
    prompt["seconds"] += changes.pop("seconds", 0.0)
    for name, change in changes.items():
        prompt["counters"][name] += change


OUTSIDE, NOT_REPLAYED = "forwards outside Resolute", "forwards not replayed"
FAULTS: Any = [
    (SIZE, 0, {"seconds": 11}, "first prompt waits, s"), (LORA, 0, {"seconds": 3}, "first prompt waits, s"),
    (RESTART, 0, {"seconds": 18}, "first prompt, s"), (START, 2, {"seconds": 2}, "a step, ms"),
    (DECODE, 2, {"seconds": 2}, "a decode, ms"), (QUEUE, 1, {"seconds": 2}, "second prompt, s"),
    (QUEUE, 6, {"seconds": 6}, "a prompt beyond stock's, s"), (QUEUE, 0, {"region_compiles": 28}, "compiles"),
    (SIZE, 2, {"region_compiles": 1}, "compiles"), (SIZE, 0, {"region_calls": -40}, "compiled regions run"),
    (RESTART, 1, {"replays": -2, "eager_calls": 2}, OUTSIDE),  # stock's where ours should be
    (DECODE, 2, {"replays": -8}, OUTSIDE),  # a node that did not run
    (QUEUE, 3, {"replays": -5, "eager_calls": 5}, OUTSIDE),  # whose code is not coming
    (SIZE, 2, {"replays": -21, "graph_calls": 21}, NOT_REPLAYED), (QUEUE, 0, {"captures": -2}, "captures"),
    (LORA, 2, {"captures": 1, "graph_calls": 1, "replays": -1}, "captures"),  # one for each prompt
]  # fmt: skip


@pytest.mark.parametrize(("kind", "number", "changes", "figure"), FAULTS)
def test_each_fault_fails_its_check(good: Result, kind: str, number: int, changes: Any, figure: str) -> None:
    assert verdicts(good) == {PASS}
    more(good, kind, number, **changes)
    assert failed(good) == {(kind, figure)}


def bypassed(good: Result) -> None:
    find(good, SIZE)[OURS]["prompts"][1]["counters"]["bypasses"] = {"observed_input": 1}


def test_errors_bypasses_memory_that_stays_and_originals_where_code_is_there_fail(good: Result) -> None:
    find(good, LORA)["errors"]["20"] = 2.8e-3
    next(row for row in good["rows"] if row["model"] == "Flux fp8" and row["kind"] == START)["errors"]["1"] = 7e-3
    bypassed(good)
    find(good, UNLOAD)[OURS]["after_unload_gib"] = 3.9
    wrong = "error to stock"
    others = {(LORA, wrong), (START, wrong), (SIZE, "bypasses"), (UNLOAD, "GiB held")}
    assert failed(good) == others
    more(good, SIZE, 2, original_replays=21)
    more(good, LORA, 2, eager_calls=1, waiting_calls=1)
    assert failed(good) == others | {(SIZE, OUTSIDE), (SIZE, NOT_REPLAYED), (LORA, OUTSIDE)}


def test_what_may_be_does_not_fail(good: Result) -> None:
    """Without a bundle code compiles at first, and until it is there originals run; some captures gain nothing."""
    good["bundle"] = {"imported": False}
    more(good, QUEUE, 0, region_compiles=28)
    for kind, number in ((QUEUE, 1), (COLD, 0)):
        more(good, kind, number, eager_calls=1, waiting_calls=1, replays=-1, original_replays=1)
    more(good, SIZE, 2, graph_calls=21, replays=-21)
    find(good, SIZE)[OURS]["prompts"][0]["without_gain"] = 1
    assert failed(good) == set()


def test_a_run_that_is_cut_before_stock_says_what_it_can(good: Result) -> None:
    for row in good["rows"]:
        row.pop(STOCK, None)
        row.pop("errors", None)
    size, waits = find(good, SIZE), "first prompt waits, s"
    found = {check.figure: check.verdict for check in checks_of(good) if check.row == size["row"]}
    assert found[waits] == found["captures"] == found["bypasses"] == PASS  # it waits less than any stock may
    assert found["a step, ms"] == found["error to stock"] == NOT_RUN
    more(good, SIZE, 0, seconds=11)
    assert failed(good) == set()  # stock's might take as long
    size[OURS]["prompts"][0]["counters"]["stall_seconds"] = 10.9
    assert failed(good) == {(SIZE, waits)}


def test_what_did_not_run_never_passes(good: Result) -> None:
    for entry, verdict in (({"prompts": []}, NOT_RUN), ({"prompts": [], "failed": "out of memory"}, FAIL)):
        for row in good["rows"]:
            row[OURS] = entry
            row.pop("errors", None)
        assert verdicts(good) == {verdict}


def test_on_a_cpu_only_counters_and_errors_are_judged(good: Result) -> None:
    good["is_cpu"] = True
    more(good, SIZE, 0, seconds=11)
    assert verdicts(good) == {PASS}
    bypassed(good)
    assert failed(good) == {(SIZE, "bypasses")}


def test_a_whole_run_measures_ours_first_and_names_its_commit(machine: Machine, tmp_path: Path) -> None:
    code, result = start(tmp_path)
    store = str(tmp_path / "store")
    stores = [(name, variables["RESOLUTE_STORE"]) for name, variables in machine.started]
    assert stores == [("cold", store), ("restart", store), ("stock", "0")]  # nothing is loaded beside stock's prompts
    assert (code, result["left"], result["failed"], result["commit"]) == (0, [], {}, "abc")
    assert machine.asked == sorted(machine.asked)  # stock's come last
    sent = sum(len(row.counts) * (1 if row.kind == COLD else 2) for row in rows(False))
    assert len(machine.prompts) == sent - 1, "a server has one first prompt"
    queue, restart = find(result, QUEUE), find(result, RESTART)
    assert restart[STOCK]["prompts"][0] == queue[STOCK]["prompts"][0]
    assert queue["errors"] == {f"prompt {number}": 0.0 for number in range(1, 9)}


def test_what_cannot_fit_is_left_out_and_does_not_pass(machine: Machine, tmp_path: Path) -> None:
    code, result = start(tmp_path, seconds=130)
    assert (code, [name for name, _ in machine.started]) == (1, ["cold", "restart", "stock"])
    assert any(name.startswith("stock: Flux") for name in result["left"])
    assert NOT_RUN in verdicts(result)


@pytest.mark.parametrize(("left", "waited"), [(0, 15), (3, smoke.rig.COMPILE_TIMEOUT)])
def test_the_first_server_ends_when_no_code_is_coming(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, waited: float
) -> None:
    get, coming = machine.get, {"coming": {"regions": left, "seconds": 9.0}} if left else {}
    monkeypatch.setattr(machine, "get", lambda path: get(path) | (coming if path == "/resolute/cache" else {}))
    assert start(tmp_path)[1]["servers"]["cold"]["waited_seconds"] == pytest.approx(waited, abs=1)


def test_a_prompt_that_fails_leaves_the_other_rows(machine: Machine, tmp_path: Path) -> None:
    machine.fails = "LoraLoaderModelOnly"
    code, result = start(tmp_path)
    assert (code, len(result["failed"]), {kind for kind, _ in failed(result)}) == (1, 2, {LORA})


def test_a_server_that_does_not_start_fails(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **settings: Any) -> Any:
        raise smoke.ServerError("ComfyUI ended with code 1")

    monkeypatch.setattr(smoke.rig, "server", refuse)
    code, result = start(tmp_path)
    assert (code, set(result["failed"]), verdicts(result)) == (1, {"cold", "restart", "stock"}, {NOT_RUN})


def test_a_file_that_is_no_bundle_leaves_the_run_cold(tmp_path: Path) -> None:
    file = tmp_path / "regions.bundle"
    file.write_bytes(b"no zip")
    found = import_bundle(file, ComfyServer(Path(sys.executable), ROOT, tmp_path / "server"), tmp_path / "store")
    assert (found["imported"], found["imported_bytes"], "bundle" in found["said"]) == (False, 6, True)


def test_the_commit_is_gits_or_the_callers_or_unknown(tmp_path: Path) -> None:
    assert commit_of(tmp_path, "abc") == {"commit": "abc", "is_dirty": None}
    names = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], [*names, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    found = commit_of(tmp_path, None)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "new").touch()
    assert (len(found["commit"]), found["is_dirty"]) == (40, False)
    assert commit_of(tmp_path, None) == {**found, "is_dirty": True}
    assert commit_of(tmp_path / "folder", None)["commit"] == "unknown"  # the repository is that of its parent
