"""The bounds and the table of `benchmarks.smoke`, and the table of docs/measured.md, from a result file alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scripts.places import ROOT

from .rig import OURS, STOCK
from .smoke_rows import BEHIND, DECODE, FLUX, FP8, LORA, QUEUE, RESTART, SDXL, SIZE, START, UNLOAD

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
MAX_EXTRA_WAIT, AIM = 1.0, 0.2  # seconds that a new size or a LoRA may wait beyond stock's, and the aim
MAX_EXTRA_RESTART = 2.0  # seconds beyond stock's
STEP, DECODED, SECOND = 0.8, 1.0, 0.55  # times stock's; SECOND: the second prompt with nothing on disk
MAX_EXTRA_GIB = 0.5  # after Unload beyond stock's; 0.2 in 2026-11-23-h200-small-cards.json
# Errors of latents to stock's: 1.5 times the largest error in result files. SDXL after 20 steps 1.8e-3, with LoRAs
# (2026-11-22-h200-dynamic-vram.json); Flux after 10 steps 1.6e-3 (2026-11-23-h200-families-by-shape.json), in fp8 after
# one step 4.2e-3 (2026-11-24-h200-quantized-latest.json).
ERRORS = {SDXL: 1.5 * 1.8e-3, FLUX: 1.5 * 1.6e-3, FP8: 1.5 * 4.2e-3}
ERROR_ON_CPU = 1e-4  # float32 there; 5e-6 was seen
ONE_STEP = {FP8}  # models whose errors are measured after one step
PAGE = ROOT / "docs" / "measured.md"
BEGIN, END = "<!-- benchmarks.smoke -->", "<!-- end of benchmarks.smoke -->"

Entry = Mapping[str, Any]


class Check(NamedTuple):
    """value, bound: None if missing. note: a remark on the figure."""

    row: str
    figure: str
    value: float | None
    bound: float | None
    verdict: str
    note: str = ""


class Figures(NamedTuple):
    """The figures of a contender in a row; None if not measured.

    first_s: seconds of the first prompt. wait_s: its seconds minus the second's. whole_s: seconds of the last prompt.
    ms: milliseconds of a step or a decode.
    """

    first_s: float | None = None
    wait_s: float | None = None
    whole_s: float | None = None
    ms: float | None = None


def figures(row: Entry, contender: str) -> Figures:
    seconds = [each["seconds"] for each in row.get(contender, {}).get("prompts", [])]
    counts = row["counts"]
    first = seconds[0] if seconds else None
    wait = seconds[0] - seconds[1] if len(seconds) > 1 and counts[0] == counts[1] else None
    if len(seconds) < 3 or row["kind"] == QUEUE:
        return Figures(first, wait)
    return Figures(first, wait, seconds[2], 1000 * (seconds[2] - seconds[1]) / (counts[2] - counts[1]))


def checks_of(result: Mapping[str, Any]) -> list[Check]:
    """All checks, including those of rows that did not run. On a CPU only counters and errors are checked."""
    return [check for row in result["rows"] for check in row_checks(row, result)]


def row_checks(row: Entry, result: Mapping[str, Any]) -> Iterator[Check]:
    if row["kind"] == UNLOAD:
        if not result["is_cpu"]:
            yield _unload(row)
        return
    yield from _counted(row, result)
    if not result["is_cpu"]:
        yield from _timed(row)
    errors, steps = row.get("errors", {}), 1 if row["model"] in ONE_STEP else row["counts"][-1]
    most = ERROR_ON_CPU if result["is_cpu"] else ERRORS[row["model"]]
    note = f"after {steps} step{'s' * (steps > 1)}"
    if row["kind"] == QUEUE:
        error = max(errors.values()) if len(errors) == len(row["counts"]) else None
        yield _check(row, "error to stock", error, most, note=f"{note}, the largest")
    elif row["kind"] not in (*BEHIND, DECODE) and len(row["counts"]) == 3:
        yield _check(row, "error to stock", errors.get(str(steps)), most, note=note)


# --- counters -------------------------------------------------------------------------------------------------------


def _counted(row: Entry, result: Mapping[str, Any]) -> Iterator[Check]:
    prompts = row.get(OURS, {}).get("prompts", [])
    whole = len(prompts) == len(row["counts"])
    total: Counter[str] = Counter()
    for each in prompts:
        total.update({name: count for name, count in each["counters"].items() if name != "bypasses"})

    def check(figure: str, value: float, bound: float, note: str = "", is_least: bool = False) -> Check:
        return _check(row, figure, value if whole else None, bound, note, is_least)

    if row["kind"] not in (*BEHIND, START) or result["bundle"].get("imported"):
        yield check("compiles", total["region_compiles"], 0)
    codes = sorted({code for each in prompts for code in each["counters"]["bypasses"]})
    yield check("bypasses", sum(sum(each["counters"]["bypasses"].values()) for each in prompts), 0, ", ".join(codes))
    calls = sum(row["counts"]) + row["decodes"] * len(row["counts"])
    compiled = total["replays"] - total["original_replays"]
    known, eager = compiled + total["graph_calls"], total["eager_calls"]
    if row["kind"] in BEHIND:  # eager calls are correct while code compiles
        known, eager = known + total["original_replays"] + total["waiting_calls"], eager - total["waiting_calls"]
    yield check("forwards outside Resolute", abs(calls - known) + eager, 0, f"of {calls}")
    if row["kind"] in (RESTART, SIZE, START):
        yield check("compiled regions run", total["region_calls"], 1, "at least", is_least=True)
    if result["is_cpu"]:
        return
    if row["kind"] == QUEUE:
        yield check("captures", total["captures"], 1, "at least", is_least=True)
        yield check("replays", total["replays"], 1, "at least", is_least=True)
    if row["kind"] in BEHIND:
        return
    yield check("captures", total["captures"], row["most"])
    if row["kind"] != DECODE:
        # On a fast host a capture gains nothing and is not made, so these calls need no replay. For decoders that is
        # known; for a model the pack logs it.
        without_gain = any(each.get("without_gain") for each in prompts)
        most = calls if without_gain else row["new"] + row["decodes"] * len(row["counts"])
        yield check("forwards not replayed", calls - compiled, most, f"of {calls}" + ", without gain" * without_gain)


# --- seconds and memory ---------------------------------------------------------------------------------------------


def _timed(row: Entry) -> Iterator[Check]:
    ours, stock, kind = figures(row, OURS), figures(row, STOCK), row["kind"]
    if kind == QUEUE:
        yield from _queued(row)
    if kind == RESTART:
        note = f"stock's + {MAX_EXTRA_RESTART:.0f}"
        yield _beyond(row, "first prompt, s", ours.first_s, stock.first_s, MAX_EXTRA_RESTART, note)
    if kind in (SIZE, LORA):
        yield _wait(row, ours.wait_s, stock.wait_s)
    if kind in BEHIND or len(row["counts"]) < 3:
        return
    most = DECODED if kind == DECODE else STEP
    figure = "a decode, ms" if kind == DECODE else "a step, ms"
    yield _check(row, figure, ours.ms, None if stock.ms is None else most * stock.ms, note=f"{most} of stock's")


def _queued(row: Entry) -> Iterator[Check]:
    """Checks of the second prompt, and of the largest excess of a prompt over stock's with the same number."""
    ours, stock = ([each["seconds"] for each in row.get(by, {}).get("prompts", [])] for by in (OURS, STOCK))
    bound = SECOND * stock[1] if len(stock) > 1 else None
    yield _check(row, "second prompt, s", ours[1] if len(ours) > 1 else None, bound, note=f"{SECOND} of stock's")
    is_whole = len(ours) == len(stock) == len(row["counts"])
    more = max(mine - other for mine, other in zip(ours, stock, strict=True)) if is_whole else None
    yield _check(row, "a prompt beyond stock's, s", more, MAX_EXTRA_WAIT)


def _beyond(row: Entry, figure: str, ours: float | None, stock: float | None, more: float, note: str) -> Check:
    """The bound is stock's value plus `more`. Without stock's value, a figure up to `more` passes."""
    if stock is None and ours is not None and ours <= more:
        return Check(row["row"], figure, ours, more, PASS, "whatever stock's")
    bound = None if stock is None else max(stock, 0.0) + more
    return _check(row, figure, ours, bound, note=note)


def _wait(row: Entry, ours: float | None, stock: float | None) -> Check:
    """As `_beyond`. Without stock's value fails if the cache alone stalled the prompt longer than `MAX_EXTRA_WAIT`."""
    figure = "first prompt waits, s"
    if stock is None and ours is not None:
        stalled = row[OURS]["prompts"][0]["counters"]["stall_seconds"]
        if min(ours, stalled) > MAX_EXTRA_WAIT:
            return Check(row["row"], figure, ours, MAX_EXTRA_WAIT, FAIL, f"{stalled:.1f} s of it in the cache")
    return _beyond(row, figure, ours, stock, MAX_EXTRA_WAIT, f"stock's + {MAX_EXTRA_WAIT:.0f}, aim {AIM}")


def _unload(row: Entry) -> Check:
    ours, stock = (row.get(each, {}).get("after_unload_gib") for each in (OURS, STOCK))
    bound = None if stock is None else stock + MAX_EXTRA_GIB
    return _check(row, "GiB held", ours, bound, note=f"stock's + {MAX_EXTRA_GIB}")


def _check(
    row: Entry, figure: str, value: float | None, bound: float | None, note: str = "", is_least: bool = False
) -> Check:
    """is_least: the bound is a minimum, not a maximum."""
    verdict = NOT_RUN
    if value is not None and bound is not None:
        verdict = PASS if (value >= bound if is_least else value <= bound) else FAIL
    why = row.get(OURS, {}).get("failed") or row.get(STOCK, {}).get("failed")
    if verdict == NOT_RUN and why:
        return Check(row["row"], figure, value, bound, FAIL, why)
    return Check(row["row"], figure, value, bound, verdict, note)


# --- the table ------------------------------------------------------------------------------------------------------


def table(checks: list[Check]) -> str:
    lines = [f"{'row':<30}{'figure':<27}{'value':>9}{'bound':>9}  verdict"]
    for each in checks:
        numbers = f"{_number(each.value):>9}{_number(each.bound):>9}"
        lines.append(f"{each.row:<30}{each.figure:<27}{numbers}  {each.verdict:<8}{each.note}".rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.2f}"


def summary(checks: list[Check]) -> str:
    passed, failed, left = (sum(each.verdict == verdict for each in checks) for verdict in (PASS, FAIL, NOT_RUN))
    return f"{passed} passed, {failed} failed, {left} not run"


# --- the page -------------------------------------------------------------------------------------------------------


def page_table(result: Mapping[str, Any], name: str) -> str:
    """The table of docs/measured.md. name: of the result file."""
    gpu = (result["gpu"] or "no GPU").partition(",")[0]
    lines = ["| seconds | stock | Resolute | | a new size waits: stock | Resolute |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        lines += _page_rows(row)
    about = f"{gpu}, {result['date'][:10]}, commit {result['commit'][:12]}."
    return "\n".join([*lines, "", f"{about} Raw file:", f"`benchmarks/results/{name}`.", *missed(checks_of(result))])


def missed(checks: list[Check]) -> list[str]:
    """Lines about checks that did not pass; empty if all passed."""
    wrong = [each for each in checks if each.verdict != PASS]
    if not wrong:
        return []
    lines = [f"- {each.row}: {each.figure}: {_number(each.value)}, bound {_number(each.bound)}" for each in wrong]
    return ["", f"{len(wrong)} of its {len(checks)} checks did not pass:", "", *lines]


def _page_rows(row: Entry) -> Iterator[str]:
    """The lines of a row; none if Resolute or stock lacks its figures."""
    ours, stock, name = figures(row, OURS), figures(row, STOCK), row["row"].removesuffix(", restart")
    if row["kind"] == QUEUE and len(row.get(STOCK, {}).get("prompts", [])) > 1:
        both = (row[each]["prompts"][1]["seconds"] for each in (STOCK, OURS))
        yield _page_row("second prompt, nothing on disk", *both)
    if row["kind"] == RESTART and ours.first_s is not None and stock.first_s is not None:
        yield _page_row("first prompt after a restart", stock.first_s, ours.first_s)
    if ours.whole_s is None or stock.whole_s is None or ours.ms is None or stock.ms is None:
        return
    if row["kind"] == START:
        yield _page_row(f"{name}, ms a step", stock.ms, ours.ms, digits=1)
    elif row["kind"] == DECODE:
        yield _page_row(f"{name}, ms", stock.ms, ours.ms, digits=1)
    else:
        yield _page_row(name, stock.whole_s, ours.whole_s, stock.wait_s, ours.wait_s)


def _page_row(name: str, stock: float, ours: float, *waits: float | None, digits: int = 2) -> str:
    shown = [f"{max(wait, 0.0):.1f}" for wait in waits if wait is not None] or ["", ""]
    cells = [name, f"{stock:.{digits}f}", f"{ours:.{digits}f}", f"{stock / ours:.1f} x", *shown]
    return f"| {' | '.join(cells)} |"


def write_page(file: Path, page: Path = PAGE) -> None:
    """Put the table of a result into a page, between BEGIN and END."""
    result = json.loads(file.read_text("utf-8"))
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{page_table(result, file.name)}\n\n{END}{after}", "utf-8")
