"""The smoke run: what passes, what fails, and what a run that is cut says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import smoke, smoke_checks
from benchmarks.smoke_checks import FAIL, NOT_RUN, OURS, PASS, STOCK, checks_of
from benchmarks.smoke_rows import COLD, DECODE, LORA, RESTART, SIZE, START, UNLOAD, prompt, rows

Result = dict[str, Any]
FILES = {"checkpoint": "x.safetensors", "lora": "y.safetensors"}


def counters(calls: int, captures: int) -> dict[str, Any]:
    counted = {"captures": captures, "graph_calls": captures, "replays": calls - captures}
    return {"region_compiles": 0, "eager_calls": 0, "stall_seconds": 0.3 * captures, "bypasses": {}, **counted}


def entry(row: dict[str, Any], first: float, step: float) -> dict[str, Any]:
    """Prompts that wait `first` seconds once and `step` in each step, and whose first captures what is new."""
    made = []
    for number, count in enumerate(row["counts"]):
        seconds = 0.5 + count * step + (0 if number else first)
        counted = counters(count + row["decodes"], 0 if number else min(row["most"], count + row["decodes"]))
        made.append({"count": count, "seconds": seconds, "counters": counted})
    return {"prompts": made}


@pytest.fixture
def good() -> Result:
    """A whole run in which all is as it should be."""
    result: Result = {"is_cpu": False, "bundle": {"imported": True}, "rows": [row.about() for row in rows(False)]}
    result |= {"date": "2026-11-25T10:00:00+00:00", "gpu": "NVIDIA X, 1.2, 80 GB", "commit": "0123456789abcdef"}
    for row in result["rows"]:
        is_restart = row["kind"] == RESTART
        row[OURS] = entry(row, 9.0 if is_restart else 0.3, 0.03)
        if row["kind"] == UNLOAD:
            row[OURS], row[STOCK] = {"after_unload_gib": 1.0}, {"after_unload_gib": 0.8}
        elif row["kind"] != COLD:
            row[STOCK] = entry(row, 8.0 if is_restart else 0.1, 0.14)
            row["errors"] = {"1": 4e-3, str(row["counts"][-1]): 1.6e-3}
    return result


def find(result: Result, kind: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["kind"] == kind)


def verdicts(result: Result) -> dict[str, int]:
    found = [check.verdict for check in checks_of(result)]
    return {verdict: found.count(verdict) for verdict in (PASS, FAIL, NOT_RUN)}


def test_a_good_run_passes(good: Result) -> None:
    found = verdicts(good)
    assert (found[FAIL], found[NOT_RUN]) == (0, 0)
    assert found[PASS] > 60


def wait(result: Result) -> None:  # as f230b81 did: each new size waited for 9 to 12 s
    find(result, SIZE)[OURS]["prompts"][0]["seconds"] += 11


def restart(result: Result) -> None:  # f230b81: 27 s
    find(result, RESTART)[OURS]["prompts"][0]["seconds"] += 18


def lora(result: Result) -> None:
    find(result, LORA)[OURS]["prompts"][0]["seconds"] += 3


def step(result: Result) -> None:
    find(result, START)[OURS]["prompts"][2]["seconds"] += 0.9


def decode(result: Result) -> None:
    find(result, DECODE)[OURS]["prompts"][2]["seconds"] += 1


def error(result: Result) -> None:
    find(result, LORA)["errors"]["20"] = 2.8e-3


def error_of_fp8(result: Result) -> None:
    row = next(row for row in result["rows"] if row["model"] == "Flux fp8" and row["kind"] == START)
    row["errors"]["1"] = 7e-3


def compiles(result: Result) -> None:
    find(result, SIZE)[OURS]["prompts"][2]["counters"]["region_compiles"] = 1


def compiles_with_the_bundle(result: Result) -> None:
    find(result, COLD)[OURS]["prompts"][0]["counters"]["region_compiles"] = 28


def bypass(result: Result) -> None:
    find(result, SIZE)[OURS]["prompts"][1]["counters"]["bypasses"] = {"observed_input": 1}


def stock_where_resolute_should_be(result: Result) -> None:
    counted = find(result, RESTART)[OURS]["prompts"][1]["counters"]
    counted["replays"] -= 2
    counted["eager_calls"] += 2


def a_node_that_did_not_run(result: Result) -> None:
    counted = find(result, DECODE)[OURS]["prompts"][2]["counters"]
    counted |= {"replays": 0, "graph_calls": 0}


def a_capture_for_each_prompt(result: Result) -> None:
    counted = find(result, LORA)[OURS]["prompts"][2]["counters"]
    counted |= {"captures": 1, "graph_calls": counted["graph_calls"] + 1, "replays": counted["replays"] - 1}


def no_replay(result: Result) -> None:
    counted = find(result, SIZE)[OURS]["prompts"][2]["counters"]
    counted |= {"graph_calls": counted["replays"], "replays": 0}


def memory(result: Result) -> None:
    find(result, UNLOAD)[OURS]["after_unload_gib"] = 3.9


@pytest.mark.parametrize(
    ("fault", "figures"),
    [
        (wait, {"first prompt waits, s"}),
        (restart, {"first prompt, s"}),
        (lora, {"first prompt waits, s"}),
        (step, {"a step, ms"}),
        (decode, {"a decode, ms"}),
        (error, {"error to stock"}),
        (error_of_fp8, {"error to stock"}),
        (compiles, {"compiles"}),
        (compiles_with_the_bundle, {"compiles"}),
        (bypass, {"bypasses"}),
        (stock_where_resolute_should_be, {"forwards outside Resolute"}),
        (a_node_that_did_not_run, {"forwards outside Resolute"}),
        (a_capture_for_each_prompt, {"captures"}),
        (no_replay, {"forwards not replayed"}),
        (memory, {"GiB held"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_fault_fails_its_check(good: Result, fault: Callable[[Result], None], figures: set[str]) -> None:
    fault(good)
    assert {check.figure for check in checks_of(good) if check.verdict == FAIL} == figures


def test_a_run_without_a_bundle_may_compile_at_first(good: Result) -> None:
    good["bundle"] = {"imported": False}
    compiles_with_the_bundle(good)
    assert verdicts(good)[FAIL] == 0


def test_a_run_that_is_cut_before_stock_says_what_it_can(good: Result) -> None:
    for row in good["rows"]:
        row.pop(STOCK, None)
        row.pop("errors", None)
    found = {(check.row, check.figure): check.verdict for check in checks_of(good)}
    size, lora = find(good, SIZE)["row"], find(good, LORA)["row"]
    assert FAIL not in found.values()
    assert found[size, "first prompt waits, s"] == PASS  # less than is allowed beyond any stock's
    assert found[lora, "captures"] == found[lora, "bypasses"] == PASS
    assert found[size, "a step, ms"] == found[size, "error to stock"] == NOT_RUN
    wait(good)
    assert waits(good) == {PASS, NOT_RUN}  # stock's might take as long
    find(good, SIZE)[OURS]["prompts"][0]["counters"]["stall_seconds"] = 10.9
    assert waits(good) == {PASS, FAIL}


def waits(result: Result) -> set[str]:
    return {check.verdict for check in checks_of(result) if check.figure == "first prompt waits, s"}


def test_what_did_not_run_never_passes(good: Result) -> None:
    for row in good["rows"]:
        row.pop(OURS)
        row.pop("errors", None)
    assert {check.verdict for check in checks_of(good)} == {NOT_RUN}
    for row in good["rows"]:
        row[OURS] = {"prompts": [], "failed": "out of memory"}
    assert {check.verdict for check in checks_of(good)} == {FAIL}


def test_a_prompt_that_is_missing_leaves_its_row_open(good: Result) -> None:
    row = find(good, SIZE)
    del row[OURS]["prompts"][2]
    found = {check.figure: check.verdict for check in checks_of(good) if check.row == row["row"]}
    assert found["first prompt waits, s"] == PASS
    assert {found[each] for each in ("a step, ms", "captures", "bypasses", "compiles")} == {NOT_RUN}


def test_on_a_cpu_only_counters_and_errors_are_judged(good: Result) -> None:
    good["is_cpu"] = True
    wait(good)
    for row in good["rows"]:
        row["errors"] = dict.fromkeys(row.get("errors", ()), 1e-5)
    assert {check.figure for check in checks_of(good)} == {
        "compiles", "bypasses", "forwards outside Resolute", "error to stock"
    }  # fmt: skip
    assert verdicts(good)[FAIL] == 0
    bypass(good)
    assert verdicts(good)[FAIL] == 1


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in rows(True) if row.counts], ids=lambda row: row.name)
def test_only_our_nodes_differ_between_contenders(row: Any) -> None:
    ours, stock = (prompt(row, each, 3, 7, FILES, True) for each in (OURS, STOCK))
    more = {name for name, node in ours.items() if node["class_type"].startswith("ResoluteCompile")}
    assert more
    assert ours.keys() - stock.keys() == more
    for name in stock:
        inputs = ours[name]["inputs"] | {key: stock[name]["inputs"].get(key) for key in ("model", "vae")}
        assert {key: value for key, value in inputs.items() if value is not None} == stock[name]["inputs"]
        assert ours[name]["class_type"] == stock[name]["class_type"]


def test_no_decode_comes_from_the_cache_of_comfyui() -> None:
    row = next(row for row in rows(False) if row.kind == DECODE)
    made = [prompt(row, STOCK, count, seed, FILES, False) for seed, count in enumerate(row.counts)]
    multipliers = [
        node["inputs"]["multiplier"] for each in made for node in each.values() if "Mult" in node["class_type"]
    ]
    assert len(multipliers) == sum(row.counts) == len(set(multipliers))


def test_rows_have_names_of_their_own_and_fit_the_time() -> None:
    for is_small in (False, True):
        assert len({row.name for row in rows(is_small)}) == len(rows(is_small))
    servers = 3 * smoke._START
    assert servers + sum(sum(row.seconds) for row in rows(False)) < smoke.SECONDS


def test_readmes_table_has_the_figures_of_both(good: Result) -> None:
    text = smoke_checks.readme(good, "2026-11-25-x-smoke.json")
    assert "| SDXL 960x720 | 3.30 | 1.10 | 3.0 x | 0.1 | 0.3 |" in text
    assert "| Flux 1024x1024, ms a step | 140.0 | 30.0 | 4.7 x |  |  |" in text
    assert "| first prompt after a restart | 11.30 | 10.10 | 1.1 x |  |  |" in text
    assert "NVIDIA X, 2026-11-25, commit 0123456789ab." in text
    assert "`benchmarks/results/2026-11-25-x-smoke.json`" in text
    assert "did not pass" not in text
    find(good, UNLOAD)[OURS]["after_unload_gib"] = 17.668
    assert text.removesuffix(".") + (
        f".\n\n1 of its {len(checks_of(good))} checks did not pass:\n\n- Unload: GiB held: 17.67, bound 1.30"
    ) == smoke_checks.readme(good, "2026-11-25-x-smoke.json")
    for row in good["rows"]:
        row.pop(STOCK, None)
    assert "| SDXL" not in smoke_checks.readme(good, "x.json")
