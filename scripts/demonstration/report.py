"""The demo's result: table and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .machine import Machine
from .plan import IMAGE_TO_IMAGE
from .run import PromptRun, Row

# On the CPU both runs are fp32, so only rounding to 8 bits differs. On CUDA they are fp16; the error is only reported.
MAX_CPU_ERROR = 1

_COLUMNS = ("workflow", "size", "batch", "tokens", "eager s", "first s", "second s")
_COUNTS = ("compiles", "captures", "replays", "calls", "bypasses", "max error")
LEGEND = """eager s: the second of two eager prompts. first s, second s: the first and the second compiled prompt.
compiles, captures, replays: sums over both. calls: forwards through compiled regions without a replay.
max error: largest difference from eager with the same seed, of 255."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the demo, in one sentence."""

    passed: bool
    sentence: str


def table(rows: Sequence[Row]) -> str:
    """One line per row, columns aligned."""
    lines = [(*_COLUMNS, *_COUNTS), *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in (enumerate(zip(line, widths, strict=True)) for line in lines)
    )


def judge(rows: Sequence[Row], machine: Machine, steps: int, bypasses: Sequence[str]) -> Verdict:
    """Judge all rows. Without a compiling backend, only the images are judged."""
    problems = [*_wrong_images(rows, machine), *_bypassed(rows, bypasses)]
    if machine.backend == "inductor":
        problems += _late_compiles(rows)
    if machine.backend != "eager":
        problems += _calls_outside(rows, steps)
    if problems:
        return Verdict(False, f"FAILED: {'; '.join(problems)}.")
    if machine.backend != "inductor":
        sentence = (
            f"Nothing was compiled here: `auto` chose {machine.why}. The images are right. "
            "Install what is missing, then run this again to see it compile."
        )
        return Verdict(True, sentence)
    return Verdict(True, _passed(rows, machine))


def _cells(row: Row) -> tuple[str, ...]:
    job = row.job
    bypasses = sum(sum(run.counters["bypasses"].values()) for run in row.compiled)
    seconds = (row.eager[-1].seconds, row.compiled[0].seconds, row.compiled[-1].seconds)
    counts = [row.total(name) for name in ("region_compiles", "captures", "replays", "graph_calls")]
    numbers = (*counts, bypasses, "-" if row.max_error is None else row.max_error)
    first = (job.workflow, job.size_text, str(job.batch), str(job.tokens))
    return (*first, *(f"{value:.2f}" for value in seconds), *map(str, numbers))


def _later(rows: Sequence[Row]) -> list[tuple[Row, PromptRun]]:
    """Every compiled prompt except the first of all, and the first that encodes a picture."""
    encoding = _first_encoding(rows)
    return [(row, run) for row in rows for run in row.compiled if run is not encoding][1:]


def _first_encoding(rows: Sequence[Row]) -> PromptRun | None:
    return next((row.compiled[0] for row in rows if row.job.workflow == IMAGE_TO_IMAGE), None)


def _late_compiles(rows: Sequence[Row]) -> list[str]:
    late = [(row, run.counters["region_compiles"]) for row, run in _later(rows)]
    problems = [f"{count} regions compiled after the first prompt ({row.job})" for row, count in late if count]
    if rows and not rows[0].compiled[0].counters["region_compiles"]:
        problems.append("the first prompt compiled nothing")
    return problems


def _calls_outside(rows: Sequence[Row], steps: int) -> list[str]:
    """Problems if fewer forwards ran compiled than there are steps and decodes; else 0 compiles would prove nothing."""
    problems = []
    for row in rows:
        expected = len(row.job.sizes) * (steps + 1)
        for run in row.compiled:
            inside = run.counters["graph_calls"] + run.counters["replays"]
            if inside < expected or run.counters["eager_calls"] or run.counters["compile_failures"]:
                problems.append(
                    f"{row.job}: {inside} forwards ran compiled (at least {expected} expected), "
                    f"{run.counters['eager_calls']} ran eagerly, {run.counters['compile_failures']} compiles failed"
                )
    return problems


def _wrong_images(rows: Sequence[Row], machine: Machine) -> list[str]:
    problems = [f"{row.job}: no image" for row in rows if not row.compiled_images]
    if machine.device == "cpu":
        wrong = [row for row in rows if row.max_error is not None and row.max_error > MAX_CPU_ERROR]
        problems += [f"{row.job}: differs from eager by {row.max_error} of 255" for row in wrong]
    return problems


def _bypassed(rows: Sequence[Row], reasons: Sequence[str]) -> list[str]:
    """Every bypass is a problem, because the bundled workflows need none."""
    codes = {code for row in rows for run in row.compiled for code in run.counters["bypasses"]}
    matching = [reason for reason in reasons if reason.split(":")[0] in codes]
    return [f"bypassed: {reason}" for reason in matching] or [f"bypassed: {code}" for code in sorted(codes)]


def _passed(rows: Sequence[Row], machine: Machine) -> str:
    first = rows[0].compiled[0].counters
    sizes = {size for row in rows for size in row.job.sizes}
    later, encoding = len(_later(rows)), _first_encoding(rows)
    more = f" and {encoding.counters['region_compiles']} in the first that encodes a picture" if encoding else ""
    error = max(row.max_error or 0 for row in rows)
    difference = f"the images differ from eager by at most {error} of 255"
    if machine.device != "cpu":
        difference += " (half precision: reported, not judged)"
    return (
        f"PASSED: {first['region_compiles']} regions compiled in the first prompt{more}, none in the {later} others, "
        f"over {len(sizes)} sizes, batches {_listed(row.job.batch for row in rows)} and "
        f"{_listed(row.job.tokens for row in rows)} tokens; {difference}."
    )


def _listed(values: Any) -> str:
    return ", ".join(map(str, sorted(set(values))))
