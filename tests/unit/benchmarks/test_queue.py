"""The queue: which prompts are sent to whom, what their tiers and errors are, and what a later run goes on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card_memory, cells, queue, rig, workloads
from benchmarks.queue import CASES, OURS, QUEUE, STOCK, line, name_of, prompts_of, tier_of
from compile_cache.config import default_budget
from scripts.setup.command import Setup

from .machine import Machine


def counters(**risen: int) -> dict[str, int]:
    return {"replays": 0, "graph_calls": 0, "eager_calls": 0, "waiting_calls": 0, **risen}


def test_the_queue_of_sdxl_has_all_that_people_change_and_starts_the_others() -> None:
    names = [name_of(prompt) for prompt in prompts_of("SDXL", False)]
    assert len(names) == CASES[QUEUE] == 24
    plain = {"1024x1024", "960x720", "1280x1280", "512x2048"}
    assert {*names} == plain | {f"1024x1024, {more}" for more in ("batch 2", "154 tokens", "LoRA")}
    assert names[:8] == ["1024x1024"] * 5 + ["960x720"] * 2 + ["1024x1024"]
    for model in ("Flux", "Z-Image"):
        others = prompts_of(model, False)
        assert (len(others), len({*others})) == (14, 2)


@pytest.mark.parametrize(
    ("risen", "tier"),
    [
        (counters(replays=20), 2),
        (counters(graph_calls=20), 2),  # on a CPU
        (counters(replays=20, original_replays=0), 2),
        (counters(replays=20, original_replays=20), 1),
        (counters(replays=18, original_replays=5, waiting_calls=2, eager_calls=2), 1),
        (counters(replays=2, original_replays=2, waiting_calls=18, eager_calls=18), 0),
        (counters(replays=15, waiting_calls=5, eager_calls=5), 0),
        (counters(eager_calls=20), 0),  # nothing ran compiled
    ],
)
def test_the_tier_of_a_prompt_follows_from_its_counters(risen: dict[str, int], tier: int) -> None:
    assert tier_of(OURS, risen) == tier
    assert tier_of(STOCK, risen) is None


def test_all_is_compiled_when_the_last_code_came() -> None:
    compiles = [{"kind": "compile", "text": text, "at": at} for text, at in (("a", 110.0), ("b", 125.0), ("", 130.0))]
    row: dict[str, Any] = {"events": compiles, "coming": {}, "prompts": [{"unix": 100.0, "tier": 2}]}
    assert queue.compiled_clock(row) == 25.0
    assert queue.compiled_clock({**row, "events": []}) == 0.0
    assert queue.compiled_clock({**row, "coming": {"regions": 1, "seconds": 5}}) is None
    assert queue.compiled_clock({**row, "prompts": [{"unix": 100.0, "tier": 1}]}) is None


def test_three_regions_of_the_unet_are_removed_the_first_by_name(tmp_path: Path) -> None:
    labels = ["ResnetBlock", "BasicTransformerBlock", "AttnBlock", "ResBlock", "SpatialTransformer.exit", "ResBlock"]
    (tmp_path / "environment").mkdir()
    for name, label in zip("fedcba", labels, strict=True):
        header = json.dumps({"label": label}).encode()
        (tmp_path / "environment" / f"{name}.region").write_bytes(header + b"\n\x80code\n")
    assert [file.stem for file in queue.removed(tmp_path)] == ["a", "b", "c"]


# --- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(new_size=1.0)
    machine.error = 0.5
    monkeypatch.setattr(rig, "server", machine.server)
    monkeypatch.setattr(rig, "environment", lambda server: {"date": "today", "gpu": "a GPU"})
    monkeypatch.setattr(queue.command, "prepare", lambda: Setup(Path(sys.executable), Path()))
    monkeypatch.setattr(workloads, "make", lambda setup, models, names, *given: dict.fromkeys(names, "x"))
    monkeypatch.setattr(queue, "write_lora", lambda *given: None)
    monkeypatch.setattr(queue.signal, "signal", lambda *given: None)
    for module in (queue, cells):
        monkeypatch.setattr(module, "time", machine)
    monkeypatch.setattr(card_memory.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [])
    return machine


def start(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    sys.argv = ["queue", "--seconds", "5000", *words, "--cpu", "--out", str(out), "--folder", str(folder / "kept")]
    return queue.main(), json.loads(out.read_text("utf-8"))


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["contender"], row["case"]) for row in found["rows"]]


def test_stock_gets_the_same_prompts_after_ours(machine: Machine, tmp_path: Path) -> None:
    code, found = start(tmp_path, "--model", "SDXL")
    assert code == 0
    assert rows(found) == [(OURS, case) for case in CASES] + [(STOCK, case) for case in CASES if "lack" not in case]
    assert [len(row["prompts"]) for row in found["rows"]][: len(CASES)] == [*CASES.values()]
    assert machine.asked == sorted(machine.asked)
    seeds = [nodes["sample"]["inputs"]["seed"] for nodes in machine.prompts]
    assert seeds[:24] == [*range(1, 25)]
    ours, stock = found["rows"][0], found["rows"][len(CASES)]
    assert [each["name"] for each in ours["prompts"]] == [each["name"] for each in stock["prompts"]]
    assert ours["prompts"][0]["error"] == pytest.approx(0.25)  # 0.5 of 1 + its seed
    assert None not in {each["error"] for row in found["rows"][: len(CASES)] for each in row["prompts"]}
    assert {each["tier"] for each in ours["prompts"]} == {2}
    assert {each["error"] for each in stock["prompts"]} == {each["tier"] for each in stock["prompts"]} == {None}
    seconds = [each["seconds"] for each in ours["prompts"]]
    assert [each["clock"] for each in ours["prompts"]] == pytest.approx([sum(seconds[:n]) for n in range(1, 25)])
    pauses = found["rows"][3]["prompts"]
    assert pauses[-1]["clock"] == pytest.approx(sum(each["seconds"] for each in pauses) + 7 * queue.PAUSE)
    assert {(row["lacks"] == [], row["peak_gib"]) for row in found["rows"]} == {(True, 0.0)}
    assert line(ours, stock).startswith("SDXL resolute queue: 1.20/2 0.20/2 ")
    total = sum(each["seconds"] for each in stock["prompts"]) / sum(seconds)
    assert f"({total:.2f} x)" in line(ours, stock)


def test_a_server_has_its_store_and_a_small_card_its_budget(machine: Machine, tmp_path: Path) -> None:
    start(tmp_path, "--model", "SDXL", "--contender", OURS, "--environment", "RESOLUTE_VERIFY=1")
    folders = [folder for folder, _ in machine.started]
    assert folders == [f"SDXL-resolute-{case}" for case in (*["queue"] * 3, "pauses", "free-8", "free-6")]
    variables = [given for _, given in machine.started]
    assert {(given["RESOLUTE_COMPILE"], given["RESOLUTE_VERIFY"]) for given in variables} == {(None, "1")}
    assert len({given["RESOLUTE_STORE"] for given in variables}) == 4
    budgets = [given.get("RESOLUTE_BUDGET_MB") for given in variables]
    assert budgets == [None] * 4 + [str(default_budget(gib << 30) >> 20) for gib in (8, 6)]


def test_stock_may_come_first(machine: Machine, tmp_path: Path) -> None:
    _, found = start(tmp_path, "--model", "Flux", "--stock-first", "--prompts", "3")
    assert rows(found) == [(STOCK, QUEUE), (OURS, QUEUE)]
    assert [each["error"] for each in found["rows"][1]["prompts"]] == pytest.approx([0.5 / n for n in (2, 3, 4)])


def test_a_later_run_measures_what_failed_and_no_more(machine: Machine, tmp_path: Path) -> None:
    machine.fails = '"seed": 3,'
    code, found = start(tmp_path, "--model", "Z-Image", "--contender", OURS)
    assert (code, [*found["failed"]]) == (1, ["Z-Image resolute queue"])
    assert len(found["rows"][0]["prompts"]) == 2, "what it had is lost"
    machine.fails = ""
    code, found = start(tmp_path, "--model", "Z-Image")
    assert (code, found["failed"], [row["lacks"] for row in found["rows"]]) == (0, {}, [[], []])
    assert found["rows"][0]["prompts"][-1]["error"] == pytest.approx(0.5 / 15)
    before = len(machine.prompts)
    start(tmp_path, "--model", "Z-Image")
    assert len(machine.prompts) == before


def test_a_restart_needs_the_store_that_the_queue_left(machine: Machine, tmp_path: Path) -> None:
    _, found = start(tmp_path, "--model", "SDXL", "--case", "restart", "--contender", OURS)
    assert rows(found) == [(OURS, QUEUE), (OURS, "restart")]
    _, found = start(tmp_path, "--model", "SDXL", "--case", "restart-lacking", "--contender", OURS)
    assert len(machine.started) == 3
    machine.fails = '"seed": 2,'
    (tmp_path / "out.json").unlink()
    _, found = start(tmp_path, "--model", "SDXL", "--case", "restart", "--contender", OURS)
    assert (rows(found), found["left"]) == ([(OURS, QUEUE)], ["SDXL resolute restart"])


def test_nothing_begins_that_cannot_end_in_time(machine: Machine, tmp_path: Path) -> None:
    machine._each = 40.0
    ends = machine.clock + 200
    code, found = start(tmp_path, "--model", "Flux", "--contender", STOCK, "--seconds", "200")
    assert (code, found["left"], machine.clock < ends) == (0, ["Flux stock queue"], True)
    assert [(len(row["prompts"]), len(row["lacks"])) for row in found["rows"]] == [(3, 11)]
