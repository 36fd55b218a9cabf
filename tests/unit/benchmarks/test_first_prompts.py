"""First prompts: which are sent to whom, at which size, and what is left out when the time ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card_memory, cells, first_prompts, rig, workloads
from benchmarks.first_prompts import BEFORE, BEHIND, BUSY, MODELS, MOST, STOCK, is_complete, line, new_size
from compile_cache.config import default_budget
from scripts.setup.command import Setup

from .machine import Machine


def prompts(*eager_calls: int) -> list[dict[str, Any]]:
    return [{"unix": 100.0, "counters": {"eager_calls": count}} for count in eager_calls]


@pytest.mark.parametrize("name", MODELS.values())
@pytest.mark.parametrize("is_small", [True, False])
def test_a_new_size_is_larger_and_suits_every_model(name: str, is_small: bool) -> None:
    size = workloads.sizes_of(name, is_small)[0]
    found = new_size(size)
    assert all(after > before and after % 64 == 0 for before, after in zip(size[:2], found[:2], strict=True))
    assert found[2:] == size[2:]


def test_a_new_size_is_a_quarter_larger() -> None:
    assert new_size((1024, 512, 1, "text")) == (1280, 640, 1, "text")


def test_a_contender_that_compiles_behind_the_picture_is_complete_when_nothing_runs_eagerly() -> None:
    assert not is_complete(BEHIND, prompts(20, 20, 20, 3))
    assert is_complete(BEHIND, prompts(20, 20, 20, 3, 0))
    assert not is_complete(BEHIND, prompts(20, 0)), "figures of a compiled prompt are missing"
    assert is_complete(BEHIND, prompts(*[20] * MOST)), "it would go on for ever"


@pytest.mark.parametrize("contender", [STOCK, BEFORE])
def test_others_are_complete_after_the_prompts_that_come_without_a_pause(contender: str) -> None:
    assert not is_complete(contender, prompts(*[20] * (BUSY - 1)))
    assert is_complete(contender, prompts(*[20] * BUSY))


def test_the_code_of_the_last_region_tells_when_all_was_compiled() -> None:
    events = [
        {"kind": "compile", "text": "a block", "at": 110.0},
        {"kind": "compile", "text": "another", "at": 125.0},
        {"kind": "compile", "text": "", "at": 127.0},  # a prompt waited
        {"kind": "capture", "text": "a graph", "at": 130.0},
    ]
    assert first_prompts.compiled_seconds(prompts(20, 0), events) == 25.0
    assert first_prompts.compiled_seconds(prompts(20, 3), events) is None
    assert first_prompts.compiled_seconds(prompts(0), []) is None


# --- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(new_size=1.0)
    monkeypatch.setattr(rig, "server", machine.server)
    monkeypatch.setattr(rig, "environment", lambda server: {"date": "today", "gpu": "a GPU"})
    monkeypatch.setattr(first_prompts.command, "prepare", lambda: Setup(Path(sys.executable), {"0.33.0": Path()}))
    monkeypatch.setattr(workloads, "make", lambda setup, models, names, *given: dict.fromkeys(names, "x"))
    monkeypatch.setattr(first_prompts.signal, "signal", lambda *given: None)
    for module in (first_prompts, cells):
        monkeypatch.setattr(module, "time", machine)
    monkeypatch.setattr(card_memory.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [])
    return machine


def start(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    sys.argv = ["first_prompts", *words, "--cpu", "--out", str(out), "--folder", str(folder / "kept")]
    return first_prompts.main(), json.loads(out.read_text("utf-8"))


def test_each_contender_has_first_prompts_a_new_size_and_a_restart(machine: Machine, tmp_path: Path) -> None:
    code, found = start(tmp_path, "--model", "Wan")
    assert code == 0
    assert machine.asked == ["stock"] * (BUSY + 2) + ["resolute"] * (BUSY + 2) * 2
    widths = [nodes["latent"]["inputs"]["width"] for nodes in machine.prompts]
    assert widths == [*[64] * BUSY, 128, 64] * 3
    assert [row["contender"] for row in found["rows"]] == [STOCK, BEHIND, BEFORE]
    stock, behind, _ = found["rows"]
    seconds = [each["seconds"] for each in stock["prompts"]]
    assert seconds == pytest.approx([1.6, 0.6, 0.6])
    assert (stock["new_size_seconds"], behind["new_size_seconds"]) == pytest.approx((1.6, 1.15))
    assert behind["restart_seconds"] == pytest.approx(0.15)
    assert [row["lacks"] for row in found["rows"]] == [[], [], []]
    said = line(stock)
    assert said.startswith("Wan stock: 1.60 0.60 0.60, new size 1.60, restart 0.60, ")


def test_a_later_run_measures_what_failed_and_no_more(machine: Machine, tmp_path: Path) -> None:
    machine.fails = '"width": 128'
    code, found = start(tmp_path, "--model", "Z-Image", "--contender", "behind")
    assert (code, found["failed"]) == (1, {"Z-Image behind": '"width": 128 failed'})
    assert len(found["rows"][0]["prompts"]) == BUSY, "what it had is lost"
    machine.fails = ""
    code, found = start(tmp_path, "--model", "Z-Image", "--contender", "behind")
    assert (code, found["failed"], found["rows"][0]["lacks"]) == (0, {}, [])
    before = len(machine.prompts)
    start(tmp_path, "--model", "Z-Image", "--contender", "behind")
    assert len(machine.prompts) == before


def test_nothing_begins_that_cannot_end_in_time(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine._each = 40.0  # a first prompt, and two more: then a new size may take twice that
    ends = machine.clock + 200
    code, found = start(tmp_path, "--model", "Flux", "--contender", "stock", "--seconds", "200")
    assert (code, found["left"], machine.clock < ends) == (0, ["Flux stock"], True)
    assert [len(row["prompts"]) for row in found["rows"]] == [BUSY]
    assert found["rows"][0]["lacks"] == ["new_size", "restart"]
    assert "Flux stock: left out" in capsys.readouterr().out


def test_captures_may_hold_what_they_may_on_a_small_card(machine: Machine, tmp_path: Path) -> None:
    _, found = start(tmp_path, "--model", "SDXL", "--free", "8")
    budgets = {environment.get("RESOLUTE_BUDGET_MB") for _, environment in machine.started}
    assert budgets == {str(default_budget(8 << 30) >> 20)}
    assert {row["free_gib"] for row in found["rows"]} == {8.0}
    start(tmp_path, "--model", "SDXL", "--contender", "stock")
    assert "RESOLUTE_BUDGET_MB" not in machine.started[-1][1]
    modes = {environment["RESOLUTE_COMPILE"] for _, environment in machine.started}
    assert modes == {BEFORE, BEHIND}
