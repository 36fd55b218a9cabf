"""A scenario runs with servers that answer at once: who is measured where and when, and how a later run goes on."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rig, run, runner, servers, workloads
from benchmarks.scenarios import SCENARIOS
from scripts.setup.command import Setup

from .machine import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(new_size=1.0)
    machine.error = 1.0
    monkeypatch.setattr(rig, "server", machine.server)
    monkeypatch.setattr(rig, "environment", lambda server: {"date": "today", "gpu": "a GPU"})
    monkeypatch.setattr(run.command, "prepare", lambda: Setup(Path(sys.executable), {"0.33.0": Path()}))
    monkeypatch.setattr(workloads, "make", lambda setup, models, names, *given: dict.fromkeys(names, "x"))
    monkeypatch.setattr(runner, "floor_ms", lambda *given: 50.0)
    monkeypatch.setattr(servers, "time", machine)
    monkeypatch.setattr(servers, "settled_bytes", lambda still: (1 << 30, 0.0))
    monkeypatch.setattr(sys, "argv", [])
    return machine


def start(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    sys.argv = ["run", *words, "--cpu", "--out", str(out), "--folder", str(folder / "kept")]
    return run.main(), json.loads(out.read_text("utf-8"))


def test_contenders_share_a_server_and_ours_comes_first(machine: Machine, tmp_path: Path) -> None:
    code, found = start(tmp_path, "families", "--model", "flux", "--sizes", "2")
    assert (code, [name for name, _ in machine.started]) == (0, ["shared"])
    ours_first = [*["resolute"] * 10, "stock", *["stock"] * 10]  # whose first prompt loads the weights again
    assert machine.asked == ["stock", *ours_first]
    first, second = found["rows"]
    assert (first["resolute"]["first_s"], first["resolute"]["wait_s"]) == (pytest.approx(1.15), pytest.approx(1.0))
    assert (first["resolute"]["ms"], first["stock"]["ms"]) == (pytest.approx(50), pytest.approx(200))
    assert (first["resolute"]["error"], first["resolute"]["error_one_step"]) == (1 / 2, pytest.approx(1 / 51))
    assert (first["resolute"]["counters"]["replays"], first["floor_ms"], second["size"]) == (11, 50.0, "96x64")


def test_a_small_card_compiles_first_and_gives_each_its_own_server(machine: Machine, tmp_path: Path) -> None:
    _, found = start(tmp_path, "small-cards", "--model", "sdxl@8", "--sizes", "1")
    assert [name for name, _ in machine.started] == ["resolute", "resolute", "stock"]
    budgets = {environment["RESOLUTE_BUDGET_MB"] for _, environment in machine.started}
    assert budgets == {str(servers.default_budget(8 << 30) >> 20)}
    assert [environment["RESOLUTE_STORE"] == "0" for _, environment in machine.started] == [False, False, True]
    assert list(found["cold"]) == ["sdxl resolute"]
    row = found["rows"][0]
    assert (row["free_gib"], row["stock"]["after_free_gib"]) == (8.0, 1.0)
    assert row["resolute"]["torch_after_unload_gib"] == 1.0
    start(tmp_path, "small-cards", "--model", "sdxl@6", "--sizes", "1")
    assert [name for name, _ in machine.started[3:]] == ["resolute", "stock"]  # it was compiled before


def test_a_restart_keeps_only_what_is_stored(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    real = shutil.rmtree

    def rmtree(path: Any, **given: Any) -> None:
        if Path(path).is_relative_to(tmp_path):
            removed.append(Path(path).relative_to(tmp_path / "kept").as_posix())
        real(path, **given)

    monkeypatch.setattr(runner.shutil, "rmtree", rmtree)
    _, found = start(tmp_path, "restart")
    assert [name for name, _ in machine.started] == [*["resolute"] * 2, *["stock"] * 2, *["core"] * 2]
    assert removed == ["caches-resolute", "caches-resolute/torchinductor_cache_dir", "caches-stock", "caches-core"]
    assert list(found["cold"]) == ["sdxl resolute", "sdxl stock", "sdxl core"]
    assert [row["lacks"] for row in found["rows"]] == [[], []]


def test_a_later_run_measures_what_failed_and_no_more(machine: Machine, tmp_path: Path) -> None:
    machine.fails = '"model": ["load", 0], "seed": 30'  # stock's second prompt
    code, found = start(tmp_path, "families", "--model", "flux")
    assert (code, found["failed"]) == (1, {"flux 64x64 batch 1 stock": f"{machine.fails} failed"})
    assert found["rows"][0]["lacks"] == ["stock"]
    machine.fails = ""
    machine.prompts.clear()
    code, found = start(tmp_path, "families", "--model", "flux")
    assert (code, found["failed"], set(machine.asked)) == (0, {}, {"stock"})
    assert found["rows"][0]["resolute"]["error"] == 1 / 2  # its latents were kept
    machine.started.clear()
    start(tmp_path, "families", "--model", "flux")
    assert machine.started == []


def test_a_run_that_is_cut_keeps_our_figures(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = property(lambda self: 0.0 if machine.asked.count("stock") > 2 else 100.0)
    monkeypatch.setattr(run.Cells, "seconds_left", left)
    _, found = start(tmp_path, "families", "--model", "flux")
    assert found["left"] == ["flux"]
    assert ("resolute" in found["rows"][0], found["rows"][0]["lacks"]) == (True, ["stock"])


def test_the_reference_is_what_errors_are_against(machine: Machine, tmp_path: Path) -> None:
    _, found = start(tmp_path, "quantized", "--model", "flux:fp8-scaled")
    row = found["rows"][0]
    assert (row["resolute"]["error"], row["stock"]["error"]) == (1 / 2, 0.0)
    assert (len(row["reference"]["seconds"]), "error" in row["reference"]) == (1, False)
    assert len(row["resolute"]["lora"]["seconds"]) == len(row["stock"]["lora"]["seconds"]) == 4


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_names_models_and_contenders_that_exist(name: str) -> None:
    scenario = SCENARIOS[name]
    assert all(workloads.known(cell) for cell in scenario.models)
    assert set(scenario.contenders) <= set(workloads.CONTENDERS)
    ours = [bool(workloads.CONTENDERS[each].backend) for each in scenario.contenders]
    assert ours == sorted(ours, reverse=True)


def test_a_model_that_does_not_exist_is_an_error() -> None:
    assert not any(map(workloads.known, ("unknown", "flux:fp9", "ltx:q4-k", "sdxl:int8")))


@pytest.mark.parametrize("name", [*workloads.CHECKPOINTS, *workloads.WHOLES, "flux", "ltx", "minimax-h3", "demo"])
@pytest.mark.parametrize("contender", workloads.CONTENDERS)
def test_only_the_contenders_nodes_differ_from_stocks(name: str, contender: str) -> None:
    size = workloads.sizes_of(name, False)[0]
    given = (size, 4, 7, dict.fromkeys(workloads.CHECKPOINTS, "x"), False)
    nodes, stock = workloads.prompt(name, contender, *given), workloads.prompt(name, "stock", *given)
    added = {node["class_type"] for key, node in nodes.items() if key not in stock}
    assert bool(added) == (contender != "stock")
    links = {"model", "vae", "control_net"}
    for key, node in stock.items():
        assert {each: nodes[key]["inputs"][each] for each in node["inputs"].keys() - links} == {
            each: node["inputs"][each] for each in node["inputs"].keys() - links
        }
    used = {link[0] for node in nodes.values() for link in node["inputs"].values() if isinstance(link, list)}
    assert {key for key in nodes if key not in stock} <= used


def test_a_table_has_a_line_for_each_contender(machine: Machine, tmp_path: Path) -> None:
    machine.fails = "TorchCompileModel"
    _, found = start(tmp_path, "families", "--model", "flux", "--contenders", "resolute", "stock", "core")
    lines = run.table(found["rows"]).splitlines()
    assert len(lines) == 4
    assert " 4.00" in lines[1] and "failed: TorchCompileModel failed" in lines[3]
    assert found["rows"][0]["lacks"] == ["core"]
