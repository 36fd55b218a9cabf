"""The queue: which prompts are sent to whom, what their tiers and errors are, and what a later run goes on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import card_memory, cells, queue, workloads
from benchmarks.queue import CASES, OURS, QUEUE, STOCK
from compile_cache.config import default_budget

from .machine import Machine

TIERS: Any = [
    (2, {"replays": 20}), (2, {"graph_calls": 20}), (1, {"replays": 20, "original_replays": 20}),
    (1, {"replays": 18, "original_replays": 5, "waiting_calls": 2}), (0, {"replays": 15, "waiting_calls": 5}),
    (0, {"replays": 2, "original_replays": 2, "waiting_calls": 18}), (0, {"eager_calls": 20}),
]  # fmt: skip


@pytest.mark.parametrize(("tier", "risen"), TIERS)
def test_the_tier_of_a_prompt_follows_from_its_counters(risen: dict[str, int], tier: int) -> None:
    counted = {**dict.fromkeys(("replays", "graph_calls", "eager_calls", "waiting_calls"), 0), **risen}
    assert (queue.tier_of(OURS, counted), queue.tier_of(STOCK, counted)) == (tier, None)


def test_all_is_compiled_when_the_last_code_came() -> None:
    compiles = [{"kind": "compile", "text": text, "at": at} for text, at in (("a", 110.0), ("b", 125.0), ("", 130.0))]
    row: dict[str, Any] = {"events": compiles, "coming": {}, "prompts": [{"unix": 100.0, "tier": 2}]}
    others = ({"events": []}, {"coming": {"regions": 1}}, {"prompts": [{"unix": 100.0, "tier": 1}]})
    assert [queue.compiled_clock({**row, **each}) for each in ({}, *others)] == [25.0, 0.0, None, None]


def test_three_regions_of_the_unet_are_removed_the_first_by_name(tmp_path: Path) -> None:
    labels = ["ResnetBlock", "BasicTransformerBlock", "AttnBlock", "ResBlock", "SpatialTransformer.exit", "ResBlock"]
    (tmp_path / "environment").mkdir()
    for name, label in zip("fedcba", labels, strict=True):
        header = json.dumps({"label": label}).encode()
        (tmp_path / "environment" / f"{name}.region").write_bytes(header + b"\n\x80code\n")
    assert [file.stem for file in queue.removed(tmp_path)] == ["a", "b", "c"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(each=1.0).serve(monkeypatch, queue)
    machine.error = 0.5
    monkeypatch.setattr(workloads, "make", lambda setup, models, names, *given: dict.fromkeys(names, "x"))
    monkeypatch.setattr(queue, "write_lora", lambda *given: None)
    monkeypatch.setattr(queue.signal, "signal", lambda *given: None)
    for module in (queue, cells):
        monkeypatch.setattr(module, "time", machine)
    monkeypatch.setattr(card_memory.torch.cuda, "is_available", lambda: False)
    return machine


def start(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    words = ("queue", "--seconds", "5000", *words, "--cpu", "--out", str(out), "--folder", str(folder / "kept"))
    with mock.patch.object(sys, "argv", list(words)):
        return queue.main(), json.loads(out.read_text("utf-8"))


def test_stock_gets_the_same_prompts_after_ours(machine: Machine, tmp_path: Path) -> None:
    code, found = start(tmp_path, "--model", "SDXL", "--environment", "RESOLUTE_VERIFY=1")
    assert code == 0
    variables = [given for _, given in machine.started][: len(CASES)]
    assert {(given["RESOLUTE_COMPILE"], given["RESOLUTE_VERIFY"]) for given in variables} == {(None, "1")}
    assert len({given["RESOLUTE_STORE"] for given in variables}) == 5  # restarts have that of the first
    budgets = [given.get("RESOLUTE_BUDGET_MB") for given in variables]
    assert budgets == [None] * 4 + [str(default_budget(gib << 30) >> 20) for gib in (12, 8, 6)]
    wanted = [(OURS, case) for case in CASES] + [(STOCK, case) for case in CASES if "lack" not in case]
    assert [(row["contender"], row["case"]) for row in found["rows"]] == wanted
    assert [len(row["prompts"]) for row in found["rows"]][: len(CASES)] == [*CASES.values()]
    assert machine.asked == sorted(machine.asked)
    ours, stock = found["rows"][0]["prompts"], found["rows"][len(CASES)]["prompts"]
    assert [(each["name"], each["seed"]) for each in ours] == [(each["name"], each["seed"]) for each in stock]
    assert ours[0]["error"] == pytest.approx(0.25)  # 0.5 of 1 + its seed
    assert None not in {each["error"] for row in found["rows"][: len(CASES)] for each in row["prompts"]}
    assert ({each["tier"] for each in ours}, {each["tier"] for each in stock}) == ({2}, {None})
    pauses = found["rows"][3]["prompts"]
    assert pauses[-1]["clock"] == pytest.approx(sum(each["seconds"] for each in pauses) + 7 * queue.PAUSE)


def test_two_models_run_in_turn(machine: Machine, tmp_path: Path) -> None:
    code, found = start(tmp_path, "--model", "SDXL and Flux", "--contender", OURS)
    assert (code, [row["case"] for row in found["rows"]]) == (0, [QUEUE])
    prompts = found["rows"][0]["prompts"]
    assert [each["model"] for each in prompts] == ["sdxl", "flux"] * 8
    assert len({each["name"] for each in prompts}) == 2, "a size of each model"


def test_a_later_run_measures_what_failed_and_no_more(machine: Machine, tmp_path: Path) -> None:
    machine.fails = '"seed": 3,'
    code, found = start(tmp_path, "--model", "Z-Image", "--contender", OURS)
    assert (code, [*found["failed"]]) == (1, ["Z-Image resolute queue"])
    assert len(found["rows"][0]["prompts"]) == 2, "what it had is lost"
    machine.fails = ""
    code, found = start(tmp_path, "--model", "Z-Image")
    assert (code, found["failed"], [row["lacks"] for row in found["rows"]]) == (0, {}, [[], []])
    assert found["rows"][0]["prompts"][-1]["error"] == pytest.approx(0.5 / 15)
    machine.fails = "seed"
    assert start(tmp_path, "--model", "Z-Image")[0] == 0, "something was measured again"


def test_a_restart_needs_the_store_that_the_queue_left(machine: Machine, tmp_path: Path) -> None:
    _, found = start(tmp_path, "--model", "SDXL", "--case", "restart", "--contender", OURS)
    assert [row["case"] for row in found["rows"]] == [QUEUE, "restart"]
    start(tmp_path, "--model", "SDXL", "--case", "restart-lacking", "--contender", OURS)
    assert len(machine.started) == 3
    machine.fails = '"seed": 2,'
    (tmp_path / "out.json").unlink()
    _, found = start(tmp_path, "--model", "SDXL", "--case", "restart", "--contender", OURS)
    assert ([row["case"] for row in found["rows"]], found["left"]) == ([QUEUE], ["SDXL resolute restart"])


def test_a_transformer_runs_the_small_cards_that_are_named(machine: Machine, tmp_path: Path) -> None:
    code, found = start(tmp_path, "--model", "Flux fp8", "--contender", OURS, "--case", "free-8", "--case", "restart")
    assert (code, [row["case"] for row in found["rows"]]) == (0, ["free-8"])
    code, found = start(tmp_path / "all", "--model", "Flux fp8", "--contender", OURS)
    assert (code, [row["case"] for row in found["rows"]]) == (0, [QUEUE])


def test_nothing_begins_that_cannot_end_in_time(machine: Machine, tmp_path: Path) -> None:
    machine.each = 40.0
    ends = machine.clock + 200
    code, found = start(tmp_path, "--model", "Flux", "--contender", STOCK, "--seconds", "200")
    assert (code, found["left"], machine.clock < ends) == (0, ["Flux stock queue"], True)
    assert [(len(row["prompts"]), len(row["lacks"])) for row in found["rows"]] == [(3, 11)]
