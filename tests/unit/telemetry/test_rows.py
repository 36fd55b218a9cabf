"""Runs and the cache in rows: pixels and the user's batch, what was waited for and why, the text of the report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from compile_cache.errors import BypassCode
from compile_cache.telemetry import report_rows, rows
from compile_cache.telemetry.reasons import BYPASSES, FIRST, FREED, SINCE, because
from compile_cache.telemetry.run_summary import Run
from compile_cache.telemetry.stats import Event
from compile_cache.texts import Text

START = 1000.0


def run(**given: Any) -> Run:
    """Four steps of 384x256 in 2 s, answered by replays, with what is given in place of that."""
    usual: dict[str, Any] = {
        "model": "SD15", "role": "unet", "width": 384, "height": 256, "batch": 1, "steps": 4, "started": START,
        "seconds": 2.0, "waited": 0.0, "counts": {"replays": 8}, "cell": 8,
    }  # fmt: skip
    return Run(**{**usual, **given})


def wait(kind: str, start: float, seconds: float) -> Event:
    return event(kind, start, seconds)


def event(kind: str, start: float, seconds: float, text: str = "") -> Event:
    return Event(kind, text, seconds, START + start + seconds)


STATUS = [
    ({"batch": 2, "seconds": 0.084}, "384x256, batch 2: Compiled, 21 ms/step"),
    (
        {"counts": {"captures": 1, "replays": 7}, "waited": 0.2, "seconds": 1.0, "waits": (wait("capture", 0, 0.2),)},
        "384x256: new size captured in 0.20 s, 0.20 s/step",
    ),
    (
        {"counts": {"region_compiles": 15, "graph_calls": 4}, "waited": 23.0, "seconds": 25.0,
         "waits": (wait("compile", 0, 20.0), wait("load", 20, 3.0))},
        "384x256: compiled 15 regions in 23.0 s, 0.50 s/step",
    ),
    (
        {"counts": {"region_loads": 1, "graph_calls": 4}, "waits": (wait("load", 0, 0.1),), "waited": 0.1, "steps": 0},
        "384x256: loaded 1 region in 0.10 s, 1.9 s",
    ),
    (
        {"counts": {"eager_calls": 4}, "bypasses": {"gradient": 4}},
        "384x256: ran uncompiled, 0.50 s/step\ngradients are on (training)",
    ),
    (
        {"counts": {"eager_calls": 4}, "why_eager": "eager (not inductor: there is no C++ compiler)"},
        "384x256: ran uncompiled, 0.50 s/step\nbackend: eager (not inductor: there is no C++ compiler)",
    ),
    ({"counts": {}}, "384x256: stopped"),
    (
        {"counts": {"region_compiles": 2}, "waits": (wait("compile", 0, 1.5),), "waited": 1.5},
        "384x256: compiled 2 regions in 1.5 s, stopped",
    ),
    ({"counts": {"replays": 3}, "stopped": True}, "384x256: stopped"),
    ({"counts": {"graph_calls": 3}, "stopped": True}, "384x256: stopped"),
    ({"why_no_calls": "pack X answers in place of the model"}, "not compiled: pack X answers in place of the model"),
    ({"role": "controlnet", "steps": 0}, "384x256: Compiled"),
    ({"counts": {"eager_calls": 4, "waiting_calls": 4}}, "384x256: compiling meanwhile, 0.50 s/step"),
    (
        {"counts": {"eager_calls": 2, "waiting_calls": 2}, "stopped": True},
        "384x256: stopped",  # what compiles goes on
    ),
    (
        {"counts": {"eager_calls": 2, "waiting_calls": 2, "graph_calls": 2, "region_compiles": 6, "captures": 1},
         "came": True, "waits": (wait("compile", 0, 0.5), wait("capture", 1, 0.1)), "waited": 0.6},
        "384x256: Now compiled, new size captured in 100 ms, 0.35 s/step",
    ),
    (
        {"counts": {"graph_calls": 3, "replays": 5}, "came": True, "times": (0.25, 0.45)},
        "384x256: Now compiled, 0.50 s a step, 1.8 times as fast as ComfyUI's own blocks (0.90 s)",
    ),
    ({"counts": {"replays": 4}, "came": True, "times": (0.25, 0.255)}, "384x256: Now compiled, 0.50 s/step"),
    (
        {"counts": {"region_compiles": 2, "graph_calls": 4}, "on_cpu": True, "waits": (wait("compile", 0, 1.0),)},
        "384x256: compiled 2 regions in 0 ms, 0.50 s/step\nOn a CPU Resolute brings no speed",
    ),
    ({"counts": {"graph_calls": 4}, "on_cpu": True}, "384x256: Compiled, 0.50 s/step"),
    (
        {"counts": {"graph_calls": 4}, "bypasses": {"streamed_weights": 4}, "step_bytes": (17 * 10**9, 24 * 10**9)},
        "384x256: Compiled, 0.50 s/step\nneeds 17 of 24 GB per step",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), STATUS)
def test_the_status_is_one_line_in_pixels_and_a_second_one_for_a_bypass(given: dict[str, Any], text: str) -> None:
    status = rows.status(run(**given))
    assert status == text
    assert len(status.splitlines()) <= 2


def test_the_seconds_that_are_said_add_up_to_the_wait() -> None:
    waits = (wait("load", 0, 2.0), wait("compile", 2, 5.0), wait("load", 7, 1.0), wait("capture", 9, 0.5))
    counts = {"region_compiles": 2, "region_loads": 1, "captures": 1, "replays": 3}
    both = run(counts=counts, seconds=10.0, waits=waits, waited=8.5)
    assert "compiled 2 regions in 5.0 s, loaded 1 region in 3.0 s, new size captured in 0.50 s" in rows.status(both)
    unsaid = run(counts={"region_compiles": 2, "replays": 3}, seconds=10.0, waits=waits, waited=8.5)
    assert "compiled 2 regions in 8.5 s" in rows.status(unsaid)


def test_the_segments_cover_the_whole_run_in_order() -> None:
    segments = run(
        seconds=5.0, counts={"graph_calls": 4}, waits=(wait("load", 0, 1.0), wait("capture", 3.0, 0.5))
    ).segments()
    assert [segment["kind"] for segment in segments] == ["load", "regions", "capture", "regions"]
    assert sum(segment["seconds"] for segment in segments) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("waiting", "stretches", "kinds"),
    [
        (4, [(1.0, 9.0)], {"load": 1, "originals": 9}),
        (4, [(1.01, 8.9)], {"load": 1, "originals": 9}),
        (2, [(1.0, 4.0)], {"load": 1, "originals": 4, "check": 1, "regions": 4}),
        (2, [(1.0, 1.5), (6.5, 2.0)], {"load": 1, "originals": 3.5, "check": 1, "regions": 4.5}),
        (0, [], {"load": 1, "regions": 8, "compile": 1}),
    ],
)
def test_the_segments_show_the_calls_that_ran_originals_while_code_came(
    waiting: int, stretches: list[tuple[float, float]], kinds: dict[str, float]
) -> None:
    """Work between two of them that nobody notices is no piece of its own."""
    moments = [wait("compile", start + 0.2, 0.02) for start, _ in stretches]
    came = [] if waiting == 4 else [wait("compile", 5.0, 1.0)]
    segments = run(
        seconds=10.0,
        counts={"eager_calls": waiting, "waiting_calls": waiting, "graph_calls": 4 - waiting},
        waits=(wait("load", 0, 1.0), *moments, *came),
        events=tuple(event("originals", *stretch) for stretch in stretches),
    ).segments()
    assert sum(segment["seconds"] for segment in segments) == pytest.approx(10.0)
    assert all(one["kind"] != other["kind"] for one, other in itertools.pairwise(segments))
    found = {kind: sum(each["seconds"] for each in segments if each["kind"] == kind) for kind in kinds}
    assert found == pytest.approx(kinds)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("latent height 15 -> 16", "the height changed from 120 to 128 pixels"),
        ("context tokens 77 -> 154", "the prompt's length changed from 77 to 154 tokens"),
        (
            "latent batch 2 -> 4, latent width 8 -> 9",
            "the batch changed from 2 to 4 and the width changed from 64 to 72 pixels",
        ),
        ("weights moved or changed", "the weights were moved or changed, by a LoRA or by ComfyUI's memory management"),
        (FIRST, "the first run of this model since it was loaded"),
        (FREED, "its capture had been freed or evicted"),
        ("control added", "control added"),
    ],
)  # fmt: skip
def test_what_made_a_call_new_is_said_in_pixels(difference: str, words: str) -> None:
    assert because(difference, 8) == words


def test_what_made_a_call_new_counts_the_pixels_of_the_models_cells() -> None:
    assert because("latent height 15 -> 16", 32) == "the height changed from 480 to 512 pixels"


def test_each_wait_has_its_sentence() -> None:
    mixed = run(
        counts={"region_compiles": 3, "region_loads": 2, "captures": 1},
        waits=(wait("compile", 0, 1.0), wait("load", 1.0, 0.5), wait("capture", 1.5, 0.25)),
        waited=1.75,
        events=(event("capture", 1.5, 0.25, "2x4x32x48: latent height 15 -> 32"),),
        bypasses={"patched_block": 3},
    )
    assert rows.reasons(mixed) == [
        "Compiled 3 regions in 1.0 s: no compiled code for these blocks was kept on this machine yet.",
        "Loaded 2 regions in 0.50 s: the first use since ComfyUI started.",
        "Captured in 0.25 s: the height changed from 120 to 256 pixels.",
        "Another node changes attention: some blocks run eager (3 times).",
    ]


def test_a_wait_for_comparisons_has_its_reason() -> None:
    counts = {"verifications": 7, "graph_calls": 4}
    found = run(counts=counts, waits=(wait("compile", 0, 1.5),), waited=1.5, width=512, height=512)
    compared = "compared 7 regions with the original in 1.5 s: the first size like this one since comfyui started."
    assert [str(text).lower() for text in rows.reasons(found)] == [compared]
    assert rows.status(found) == "512x512: Compiled, compared 7 regions with the original in 1.5 s, 0.12 s/step"
    compiled = run(counts={**counts, "region_compiles": 7}, waits=(wait("compile", 0, 1.5),), waited=1.5)
    assert not any("ompared" in text for text in rows.reasons(compiled)), "a compile contains it"
    assert rows.reasons(run(counts=counts, waits=(wait("compile", 0, 0.01),), waited=0.01)) == []


def test_many_reasons_are_counted_and_not_listed() -> None:
    captures = tuple(event("capture", index / 10, 0.05, f"x: latent height 1 -> {index}") for index in range(2, 9))
    reasons = rows.reasons(run(counts={"captures": 7}, events=captures))
    assert len(reasons) == 5
    assert reasons[-1] == "And 3 more."


def test_every_bypass_has_words() -> None:
    assert set(BYPASSES) == {code.value for code in BypassCode}


def test_what_compiled_because_a_setting_of_torch_changed_names_it() -> None:
    text = f"unet 1x4x8x8: {FIRST}{SINCE}fp16 accumulation False -> True"
    counts = {"region_compiles": 21, "graph_calls": 4}
    waits = (wait("compile", 0, 2.0),)
    found = rows.reasons(run(counts=counts, events=(event("signature", 0, 0.0, text),), waits=waits, waited=2.0))
    changed = "torch's settings changed since this model last ran: fp16 accumulation False -> True"
    assert found[0] == f"Compiled 21 regions in 2.0 s: {changed}."
    assert because(f"{FIRST}{SINCE}fp16 accumulation False -> True", 8) == changed


def test_the_log_has_what_rose_what_was_waited_for_and_what_was_new() -> None:
    found = run(
        counts={"graph_calls": 4, "region_compiles": 2, "replays": 0},
        waited=1.5,
        events=tuple(event("signature", 0, 0, f"unet {number}") for number in range(4)),
        bypasses={"gradient": 2},
    )
    line = "4 calls through regions, 2 region compiles, waited 1.5 s; new: unet 0; unet 1; unet 2; ..."
    assert rows.log_line(found) == f"{line}; bypassed: 2x gradient"
    assert rows.log_line(run(counts={}, why_no_calls="pack X answers")) == "no calls: pack X answers"


def test_a_run_without_a_wait_shows_what_was_measured_in_place_of_its_own_second_line() -> None:
    plain = {"counts": {"replays": 4}, "bypasses": {"gradient": 1}}
    assert rows.status(run(**plain), Text("2.9x stock")).splitlines()[1:] == ["2.9x stock"]
    waited = run(**{**plain, "counts": {"captures": 1, "replays": 4}})
    assert "stock" not in rows.status(waited, Text("2.9x stock"))


def test_the_report_has_each_fact_once() -> None:
    decode = {"role": "vae_decode", "shape": [1, 16, 21, 60, 104], "seconds": 1.3, "original_seconds": 1.1}
    states = [(True, True), (True, False), (False, False)]
    entry = {
        "size": "",
        "latent_shape": [2, 4, 8, 9],
        "role": "unet",
        "backend": "inductor",
        "hits": 7,
        "bytes": 3 << 19,
    }
    timed: dict[str, Any] = {
        "q": [2, 3, 9, 8],
        "kernel": "math",
        "milliseconds": {"math": 1.0, "flash": 2.0},
        "like": None,
    }
    near = {"q": [2, 3, 6, 8], "kernel": "math", "milliseconds": {}, "like": [9, 77], "failed": {}}
    failed = {"q": [2, 3, 5, 8], "kernel": "torch", "milliseconds": {}, "like": None, "failed": {"flash": "no kernel"}}
    data = {
        "counters": {"region_compiles": 15, "stall_seconds": 2.25, "bypasses": {"gradient": 3}},
        "regions_ready": 2,
        "sizes_ready": 1,
        "bytes": 5 << 20,
        "budget_bytes": 64 << 20,
        "modules": [
            {"blocks": {"known": 4}, "regions_compiled": 2, "regions": 4, "formats": ["fp8"], "left_out": ["mid"]}
        ],
        "attention": [{**timed, "failed": {"cudnn": "no plan"}}, near, failed],
        "whole_calls": [{**decode, "is_settled": settled, "is_left_alone": alone} for settled, alone in states],
        "measurements": [
            {"device": "H100", "date": "2026-11-27", "model": "SDXL", "text": "1024x1024: 1.10 s, 2.9x stock",
             "size": "1024x1024", "seconds": 1.1, "stock_seconds": 3.2},
        ],
        "failed": {"regions": 1, "text": "1 region could not be compiled: no"},
        "entries": [entry],
    }  # fmt: skip
    assert report_rows.report(data).splitlines() == [
        "Fast: 2.9 times stock at 1 size",
        "1 region could not be compiled: no",
        "2 regions, 1 size ready",
        "0 replays, 0 calls through regions, 0 eager calls, 0 captures, 15 region compiles, 0 region loads",
        "2.2 s spent compiling and capturing; 5 of 64 MiB used by captures",
        "bypassed 3 times: gradient",
        "2 of 4 regions compiled; blocks: 4 known",
        "  weights: fp8",
        "attention of 2x3x9x8 with math: flash 2.00 ms, math 1.00 ms",
        "attention of 2x3x6x8 with math: as for 9x77 tokens",
        "attention of 2x3x5x8 with torch: flash failed",
        "decoding 1x16x21x60x104 falls back to eager: 1.3 s compiled, 1.1 s eager on this device",
        "decoding 1x16x21x60x104 runs compiled: 1.3 s, 1.1 s eager on this device",
        "measured on H100, 2026-11-27: SDXL 1024x1024: 1.10 s, 2.9x stock",
        "left out of compiling: mid",
        "",
        "size     what        backend    hits     MiB",
        "2x4x8x9  sampling    inductor      7     1.5",
    ]
    unmeasured = {**data, "measurements": []}
    assert report_rows.report(unmeasured).startswith("1 region could not be compiled: no\n2 regions")
    asks = "Speed not measured: press 'Measure against stock' in the panel\n2 regions"
    assert report_rows.report({**unmeasured, "failed": {"regions": 0}}).startswith(asks)
