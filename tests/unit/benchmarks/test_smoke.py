"""The smoke run: what passes, what fails, and what a run that is cut says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import smoke, smoke_checks
from benchmarks.smoke_checks import FAIL, NOT_RUN, OURS, PASS, STOCK, checks_of
from benchmarks.smoke_rows import COLD, DECODE, LORA, QUEUE, RESTART, SIZE, START, UNLOAD, prompt, rows

Result = dict[str, Any]
FILES = {"checkpoint": "x.safetensors", "lora": "y.safetensors"}


def counters(calls: int, captures: int) -> dict[str, Any]:
    counted = {"captures": captures, "graph_calls": captures, "replays": calls - captures, "original_replays": 0}
    compiled = {"region_compiles": 0, "region_calls": 20 * captures, "eager_calls": 0, "waiting_calls": 0}
    return {"stall_seconds": 0.3 * captures, "bypasses": {}, **compiled, **counted}


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
        if row["kind"] == QUEUE:
            row["errors"] = {f"prompt {1 + number}": 1.6e-3 for number in range(len(row["counts"]))}
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


def more(result: Result, kind: str, number: int, **changes: float) -> None:
    """More seconds in a prompt of ours, or more of a counter."""
    prompt = find(result, kind)[OURS]["prompts"][number]
    prompt["seconds"] += changes.pop("seconds", 0.0)
    for name, change in changes.items():
        prompt["counters"][name] += change


WAIT: Any = (SIZE, 0, {"seconds": 11})  # as f230b81 did: each new size waited for 9 to 12 s
WITH_THE_BUNDLE: Any = (QUEUE, 0, {"region_compiles": 28})


@pytest.mark.parametrize(
    ("kind", "number", "changes", "figure"),
    [
        (*WAIT, "first prompt waits, s"),
        (RESTART, 0, {"seconds": 18}, "first prompt, s"),  # f230b81: 27 s
        (LORA, 0, {"seconds": 3}, "first prompt waits, s"),
        (START, 2, {"seconds": 0.9}, "a step, ms"),
        (DECODE, 2, {"seconds": 1}, "a decode, ms"),
        (SIZE, 2, {"region_compiles": 1}, "compiles"),
        (*WITH_THE_BUNDLE, "compiles"),
        (RESTART, 1, {"replays": -2, "eager_calls": 2}, "forwards outside Resolute"),  # stock's where ours should be
        (DECODE, 2, {"replays": -8, "graph_calls": 0}, "forwards outside Resolute"),  # a node that did not run
        (LORA, 2, {"captures": 1, "graph_calls": 1, "replays": -1}, "captures"),  # one for each prompt
        (SIZE, 2, {"graph_calls": 21, "replays": -21}, "forwards not replayed"),
        (SIZE, 0, {"region_calls": -40}, "compiled regions run"),
        (QUEUE, 1, {"seconds": 1.0}, "second prompt, s"),
        (QUEUE, 6, {"seconds": 4.0}, "a prompt beyond stock's, s"),
        (QUEUE, 0, {"captures": -2}, "captures"),
        (QUEUE, 3, {"eager_calls": 5, "replays": -5}, "forwards outside Resolute"),  # whose code is not coming
    ],
)
def test_each_fault_fails_its_check(good: Result, kind: str, number: int, changes: Any, figure: str) -> None:
    more(good, kind, number, **changes)
    assert {check.figure for check in checks_of(good) if check.verdict == FAIL} == {figure}


def test_calls_that_gain_nothing_from_a_capture_need_no_replay(good: Result) -> None:
    more(good, SIZE, 2, graph_calls=21, replays=-21)
    find(good, SIZE)[OURS]["prompts"][0]["without_gain"] = 1
    assert verdicts(good)[FAIL] == 0


def test_originals_are_right_while_their_code_is_coming_and_not_after_that(good: Result) -> None:
    for kind, number in ((QUEUE, 1), (COLD, 0)):
        more(good, kind, number, eager_calls=1, waiting_calls=1, replays=-1)
        more(good, kind, number, original_replays=1)
    assert verdicts(good)[FAIL] == 0
    for kind, changes in ((SIZE, {"original_replays": 21}), (LORA, {"eager_calls": 1, "waiting_calls": 1})):
        more(good, kind, 2, **changes)
    failed = {(check.row, check.figure) for check in checks_of(good) if check.verdict == FAIL}
    assert (find(good, SIZE)["row"], "forwards outside Resolute") in failed
    assert (find(good, SIZE)["row"], "forwards not replayed") in failed
    assert (find(good, LORA)["row"], "forwards outside Resolute") in failed


def test_errors_bypasses_and_memory_that_stays_fail(good: Result) -> None:
    find(good, LORA)["errors"]["20"] = 2.8e-3
    fp8 = next(row for row in good["rows"] if row["model"] == "Flux fp8" and row["kind"] == START)
    fp8["errors"]["1"] = 7e-3
    bypass(good)
    find(good, UNLOAD)[OURS]["after_unload_gib"] = 3.9
    failed = [(check.row, check.figure) for check in checks_of(good) if check.verdict == FAIL]
    assert sorted(failed) == sorted(
        [
            (find(good, LORA)["row"], "error to stock"),
            (fp8["row"], "error to stock"),
            (find(good, SIZE)["row"], "bypasses"),
            ("Unload", "GiB held"),
        ]
    )


def bypass(result: Result) -> None:
    find(result, SIZE)[OURS]["prompts"][1]["counters"]["bypasses"] = {"observed_input": 1}


def test_a_run_without_a_bundle_may_compile_at_first(good: Result) -> None:
    good["bundle"] = {"imported": False}
    more(good, *WITH_THE_BUNDLE[:2], **WITH_THE_BUNDLE[2])
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
    more(good, *WAIT[:2], **WAIT[2])
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
    more(good, *WAIT[:2], **WAIT[2])
    for row in good["rows"]:
        row["errors"] = dict.fromkeys(row.get("errors", ()), 1e-5)
    assert {check.figure for check in checks_of(good)} == {
        "compiles", "bypasses", "forwards outside Resolute", "compiled regions run", "error to stock"
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
    assert "| second prompt, nothing on disk | 3.30 | 1.10 | 3.0 x |  |  |" in text
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
