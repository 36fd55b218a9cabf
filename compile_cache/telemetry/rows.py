"""Counters, waits and events as rows for users: the node, the panel, the log, the report and the routes print them.

Plain data: no torch, no ComfyUI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..keys import Role
from ..texts import Text, words_of
from .reasons import FIRST, SINCE, because, in_short
from .run_summary import NOW_COMPILED, SAID, Run, time_text
from .stats import SHORT_WAIT

_MAX_REASONS = 4
LEAST_GAIN = 1.05  # smaller gains are not reported
_MAX_NEW_SIGNATURES = 3
# Texts of events of kind load: for the first model of a backend in this process, and for each later one.
BACKEND, MODEL = "the backend", "the model's blocks"
# Fields and counters of a run in `GET /resolute/runs`.
_RUN_FIELDS = ("model", "structure", "file", "role", "size", "steps", "started", "stopped", "came")
_COUNTED = (
    "replays", "original_replays", "graph_calls", "eager_calls", "captures", "region_compiles", "region_loads",
    "verifications",
)  # fmt: skip

ROLES = {
    "unet": "sampling",
    "vae_decode": "decoding",
    "vae_encode": "encoding",
    "controlnet": "ControlNet",
    "deepcache_full": "full steps",
    "deepcache_fast": "fast steps",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Work that a run waited for. why: its reason; empty if other rows state it. is_result: the node shows it too."""

    text: Text
    why: Text | str = ""
    is_result: bool = False


# --- one run ----------------------------------------------------------------------------------------------------


def status(run: Run, measured: Text | None = None) -> Text:
    """Return the result in up to three lines, as the node shows it: "384x256, batch 2: Compiled, 21 ms/step".

    measured: the result of *Measure against stock* for this model and size, a second line for a run without waits.
    """
    first, *more = lines(run)
    if run.on_cpu and run.role == Role.UNET.value and not run.stopped and (run.ran_originals or not run.is_plain):
        more.append(Text("On a CPU Resolute brings no speed"))
    if not run.why_no_calls:
        first = Text("{size}: {result}", size=run.size, result=first)
    return Text.joined("\n", [first, measured] if measured is not None and run.is_plain else [first, *more])


def lines(run: Run) -> list[str]:
    """Return the lines of `status` without the size."""
    if run.why_no_calls:
        return [Text("not compiled: {why}", why=run.why_no_calls)]
    result: list[str] = [Text.joined(", ", _results(run))]
    result += [", ".join(text.partition(":")[0] for text in run.formats)] if run.formats else []
    if run.why_eager:
        return [*result, Text("backend: {why}", why=run.why_eager)]
    return result + [_streams(run) or in_short(code) for code in run.bypasses][:1]


def reasons(run: Run) -> list[Text]:
    """Return why the run waited and why calls were bypassed: one sentence each, and a count if there are more."""
    sentences = [Text("{text}: {why}.", text=row.text, why=row.why) for row in _work(run) if row.why]
    sentences += [Text("{why} ({count} times).", why=in_short(code), count=n) for code, n in run.bypasses.items()]
    if run.why_no_calls:
        sentences.append(Text("{why}.", why=run.why_no_calls))
    kept = list(dict.fromkeys(text.as_sentence() for text in sentences))
    more = len(kept) - _MAX_REASONS
    return [*kept[:_MAX_REASONS], *([Text("And {count} more.", count=more)] if more > 0 else [])]


def marks(run: Run) -> list[Text]:
    """Return labels for an unusual run (a warm-up, a cancelled one), for its line in the panel."""
    return [Text("warm-up")] * run.is_warm_up + [Text("cancelled")] * run.stopped


def plain(run: Run) -> dict[str, Any]:
    """Return plain data for the panel and `GET /resolute/runs`. words: the other texts in translatable form."""
    texts: dict[str, Sequence[str]] = {"lines": lines(run), "reasons": reasons(run), "marks": marks(run)}
    return {
        **{name: getattr(run, name) for name in _RUN_FIELDS},
        "seconds": round(run.seconds, 4),
        "waited": round(run.waited, 4),
        "counts": {name: run.counts.get(name, 0) for name in _COUNTED},
        "status": status(run),
        "segments": run.segments(),
        "bypasses": dict(run.bypasses),
        **texts,
        "words": {name: [words_of(text) for text in some] for name, some in texts.items()},
    }


def log_line(run: Run) -> str:
    """Return the line for ComfyUI's log: the run's counts, its wait, new signatures and bypasses."""
    line = ", ".join(text for name, text in counted(run.counts).items() if run.counts.get(name)) or "no calls"
    if run.why_no_calls:
        line += f": {run.why_no_calls}"
    if run.waited >= SHORT_WAIT:
        line += f", waited {time_text(run.waited)}"
    if new := [event.text for event in run.events if event.kind == "signature"]:
        more = "; ..." if len(new) > _MAX_NEW_SIGNATURES else ""
        line += f"; new: {'; '.join(new[:_MAX_NEW_SIGNATURES])}{more}"
    if run.bypasses:
        line += f"; bypassed: {', '.join(f'{count}x {code}' for code, count in run.bypasses.items())}"
    return line


def _work(run: Run) -> list[Row]:
    """Return each piece of work that the run waited for, in reading order."""
    rows, first_use = [], Text("the first use since ComfyUI started")
    came_behind, compiles = run.came or run.ran_originals, run.counts.get("region_compiles", 0)
    if compiles and not came_behind:
        text = Text("compiled {count} regions in {time}", count=compiles, time=time_text(run.seconds_of("compile")))
        rows.append(Row(text, _why_compiled(run), is_result=True))
    elif (count := compiles or run.counts.get("verifications", 0)) and run.seconds_of("compile") >= SHORT_WAIT:
        # Code is compared with the original before its first use at sizes for which its guards prove nothing.
        time = time_text(run.seconds_of("compile"))
        text = Text("compared {count} regions with the original in {time}", count=count, time=time)
        unknown = Text("the first size like this one since ComfyUI started")
        rows.append(Row(text, Text("their code has just come") if came_behind else unknown, is_result=not came_behind))
    if loads := run.counts.get("region_loads", 0):
        text = Text("loaded {count} regions in {time}", count=loads, time=time_text(run.seconds_of("load")))
        rows.append(Row(text, first_use, is_result=True))
    rows += [
        Row(Text("loaded the backend in {time}", time=time_text(each)), first_use) for each in _loads(run, BACKEND)
    ]
    again = because(FIRST, run.cell)
    rows += [Row(Text("read the model's blocks in {time}", time=time_text(each)), again) for each in _loads(run, MODEL)]
    if measured := [event.seconds for event in run.events if event.kind == "measure"]:
        time = time_text(sum(measured))
        text = Text("chose {count} attention kernels in {time}", count=len(measured), time=time)
        rows.append(Row(text, Text("the first use of a shape since ComfyUI started")))
    if run.counts.get("captures", 0):
        rows.append(Row(Text("new size captured in {time}", time=time_text(run.seconds_of("capture"))), is_result=True))
    for event in run.events:
        if event.kind == "capture":
            why = because(event.text.partition(": ")[2], run.cell)
            rows.append(Row(Text("captured in {time}", time=time_text(event.seconds)), why))
    return rows


def _why_compiled(run: Run) -> Text:
    unknown = Text("no compiled code for these blocks was kept on this machine yet")
    return next((because(event.text, run.cell) for event in run.events if SINCE in event.text), unknown)


def _results(run: Run) -> list[str]:
    done = [row.text for row in _work(run) if row.is_result]
    answered = run.counts.get("replays", 0) + run.counts.get("graph_calls", 0)
    if run.stopped or not (answered or run.counts.get("eager_calls", 0)):
        return [*done, Text("stopped")]
    waits = [Text("ComfyUI's own blocks as one CUDA graph")] if run.counts.get("original_replays", 0) else []
    waits = waits or ([Text("compiling meanwhile")] if run.counts.get("waiting_calls", 0) else [])
    done = [NOW_COMPILED, *done] if run.came else [*done, *waits]
    if not (run.came or waits or any(run.counts.get(name, 0) for name in SAID.values())):
        done.insert(0, Text("Compiled") if answered else Text("ran uncompiled"))
    return [*done, *_speed(run)]


def _speed(run: Run) -> list[str]:
    seconds = run.seconds_without_waits
    if run.role == Role.CONTROLNET.value or not seconds:
        return []
    compiled, original = run.times or (0.0, 0.0)
    if run.came and run.steps and original >= LEAST_GAIN * compiled > 0:
        calls = sum(run.counts.get(name, 0) for name in ("replays", "graph_calls", "eager_calls")) / run.steps
        time, own = time_text(calls * compiled), time_text(calls * original)
        text = "{time} a step, {times} times as fast as ComfyUI's own blocks ({own})"
        return [Text(text, time=time, times=f"{original / compiled:.1f}", own=own)]
    return [Text("{time}/step", time=time_text(seconds / run.steps))] if run.steps else [time_text(seconds)]


def _streams(run: Run) -> str:
    """Say how much of an oversized model a step needs; empty if it needs all of it."""
    needed, every = (f"{each / 1e9:.2g}" for each in run.step_bytes)
    return Text("needs {needed} of {every} GB per step", needed=needed, every=every) if needed != every else ""


def _loads(run: Run, what: str) -> list[float]:
    return [event.seconds for event in run.events if event.kind == "load" and event.text == what]


# --- the cache --------------------------------------------------------------------------------------------------


def failed_text(reasons: Sequence[str]) -> Text | None:
    """Count the regions whose compiles failed, and give the reason of the first one."""
    if not reasons:
        return None
    return Text("{count} regions could not be compiled: {why}", count=len(reasons), why=reasons[0])


def counted(counts: Mapping[str, int]) -> dict[str, Text]:
    """Return a phrase for each counter that users see, by its name. Missing counters count as 0."""
    waiting = {"waiting_calls": Text("{count} not compiled yet", count=n)} if (n := counts.get("waiting_calls")) else {}
    own = Text("{count} of them of ComfyUI's own blocks", count=counts.get("original_replays", 0))
    return {
        "replays": Text("{count} replays", count=counts.get("replays", 0)),
        **({"original_replays": own} if counts.get("original_replays") else {}),
        "graph_calls": Text("{count} calls through regions", count=counts.get("graph_calls", 0)),
        "eager_calls": Text("{count} eager calls", count=counts.get("eager_calls", 0)),
        "captures": Text("{count} captures", count=counts.get("captures", 0)),
        "region_compiles": Text("{count} region compiles", count=counts.get("region_compiles", 0)),
        "region_loads": Text("{count} region loads", count=counts.get("region_loads", 0)),
        **waiting,
    }


def totals(data: Mapping[str, Any]) -> list[Text]:
    """Return the cache's work since the start: counts, waits, bypasses. data: from `cache_report.report`."""
    counters = data["counters"]
    text = "{seconds} s spent compiling and capturing; {used} of {budget} MiB used by captures"
    used, budget = data["bytes"] >> 20, data["budget_bytes"] >> 20
    return [
        Text("{regions} regions, {sizes} sizes ready", regions=data["regions_ready"], sizes=data["sizes_ready"]),
        Text.joined(", ", counted(counters).values()),
        Text(text, seconds=f"{counters['stall_seconds']:.1f}", used=used, budget=budget),
        *(
            Text("bypassed {count} times: {code}", count=count, code=code)
            for code, count in sorted(counters["bypasses"].items())
        ),
    ]
