"""The cache's reports: the report node, Free Graphs and the HTTP interface."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.server.process import ComfyServer

from .rig import Bench, Run, assert_ran_compiled, assert_same, compiled, run_with_events

STEPS = 4

COUNTERS = {
    "signatures",
    "region_compiles",
    "compile_failures",
    "verifications",
    "captures",
    "replays",
    "region_calls",
    "graph_calls",
    "eager_calls",
    "evictions",
    "streamed_bytes",
    "stall_seconds",
    "bypasses",
}


@pytest.fixture
def reported(bench: Bench, warm: Run, tiny_prompt: Any, node: Any, seed: int) -> Run:
    """A compiled prompt with the report after its image; it saves the image."""
    prompt = compiled(tiny_prompt(seed=seed, steps=STEPS))
    prompt["report"] = node("ResoluteReport", any=["decode", 0])
    prompt["text"] = node("PreviewAny", source=["report", 0])
    return bench.run(prompt)


def test_the_report_is_a_text_with_the_counters(bench: Bench, reported: Run) -> None:
    shown = {name: output.get("text") for name, output in reported.history["outputs"].items()}
    assert len(shown["report"]) == 1
    assert shown["text"] == shown["report"]
    counters = bench.counters()
    for counter, text in (
        ("region_compiles", "region compiles"),
        ("graph_calls", "calls through regions"),
        ("eager_calls", "eager calls"),
    ):
        assert f"{counters[counter]} {text}" in shown["report"][0]


def test_the_report_runs_again_when_only_the_cache_has_changed(
    bench: Bench, reported: Run, tiny_prompt: Any, node: Any
) -> None:
    alone = {"report": node("ResoluteReport")}
    first = bench.run(alone).history["outputs"]["report"]["text"]
    bench.run(compiled(tiny_prompt(seed=1, steps=STEPS + 1)))
    second = bench.run(alone).history["outputs"]["report"]["text"]
    assert first != second


@pytest.mark.usefixtures("warm")
def test_free_graphs_passes_its_input_through_and_compiles_nothing(
    bench: Bench, tiny_prompt: Any, node: Any, seed: int
) -> None:
    prompt = compiled(tiny_prompt(seed=seed, steps=STEPS))
    expected = bench.run(prompt)
    prompt["sample"]["inputs"]["denoise"] = 0.999999  # the same steps, but not in ComfyUI's cache
    for name, source in (("free-latent", "sample"), ("free-image", "decode")):
        prompt[name] = node("ResoluteFree", any=[source, 0])
    prompt["decode"]["inputs"]["samples"] = prompt["samples"]["inputs"]["samples"] = ["free-latent", 0]
    prompt["image"]["inputs"]["images"] = ["free-image", 0]
    freed = bench.run(prompt)
    assert_same(freed, expected)
    assert_ran_compiled(freed, STEPS + 1)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("path", ["/resolute/cache", "/api/resolute/cache"])
def test_the_cache_route_returns_counters_bytes_and_entries(bench: Bench, path: str) -> None:
    report = bench.client.get(path)
    assert report.keys() >= {"counters", "bytes", "budget_bytes", "entries", "modules"}
    assert report["counters"].keys() >= COUNTERS
    assert isinstance(report["counters"]["bypasses"], dict)
    assert report["counters"]["region_compiles"] > 0
    assert report["counters"]["stall_seconds"] > 0
    assert 0 <= report["bytes"] <= report["budget_bytes"]
    assert report["entries"] == []  # nothing is captured on a CPU
    for module in report["modules"]:
        assert module.keys() >= {"module", "backend", "regions_compiled", "regions", "blocks"}


@pytest.mark.usefixtures("warm")
def test_events_report_compiles_and_their_seconds(bench: Bench, node: Any, tiny_prompt: Any) -> None:
    prompt = tiny_prompt(seed=1, steps=1)
    prompt["model"] = node("ResoluteTestOtherModel", seed=1, kind="short", channels=64)  # a width of this test only
    rise = bench.run(compiled(prompt)).rise["region_compiles"]
    events = bench.client.get("/resolute/events")["events"]
    assert all(event.keys() >= {"kind", "text", "seconds", "at"} for event in events)
    compiled_regions = [event for event in events if event["kind"] == "compile"]
    assert len(compiled_regions) >= rise > 0
    assert all(event["text"] and event["seconds"] > 0 for event in compiled_regions)


CHANGES = [
    ({"tokens": 154}, "unet 2x4x15x21: context tokens 77 -> 154"),
    ({"height": 128}, "unet 2x4x16x21: latent height 15 -> 16"),
    ({"batch": 2}, "unet 4x4x15x21: latent batch 2 -> 4"),
]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_the_changed_component_is_named(
    server: ComfyServer, bench: Bench, tiny_prompt: Any, node: Any, seeds: Any, change: dict[str, int], text: str
) -> None:
    # A new model, so that its earlier signatures are only those of this test.
    own = node("ResoluteTestTinyModel", seed=next(seeds), kind="sd")
    size = {"width": 168, "height": 120, "steps": 1}
    for parameters in (size, {**size, **change}):
        prompt = compiled({**tiny_prompt(seed=1, **parameters), "model": own})
        heard = run_with_events(bench.client, prompt)
    texts = bench.texts("signature")
    assert text in texts
    assert texts.count(text) == 1
    assert f"new: {text}" in server.log()
    shown = [shown for name, shown in heard.texts if name == "sample-model-0"]
    batch = ", batch 2" if change.get("batch") == 2 else ""
    expected = f"168x{change.get('height', 120)}{batch}: Compiled, "
    assert shown[-1].startswith(expected) and shown[-1].endswith("/step"), shown
