"""A mistake gets a sentence that says what to do, and the next prompt runs as if nothing had happened."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts.support.errors import PromptError

from .rig import (
    Bench,
    assert_ran_compiled,
    assert_same,
    compile_model,
    compiled,
    node,
    with_model,
    with_vae,
)

CHOICES = ("auto", "inductor", "cudagraph", "eager")
STEPS = 4


def failure_of(bench: Bench, prompt: Any) -> str:
    """The message of a prompt that has to fail."""
    with pytest.raises(PromptError) as caught:
        bench.run(prompt)
    return str(caught.value)


@pytest.mark.parametrize("where", [with_model, with_vae])
def test_an_unknown_backend_names_the_choices(bench: Bench, tiny_prompt: Any, where: Any) -> None:
    nonsense = compile_model("nonsense") if where is with_model else "nonsense"
    message = failure_of(bench, where(tiny_prompt(), nonsense))
    assert "nonsense" in message
    assert all(re.search(rf"\b{choice}\b", message) for choice in CHOICES), message


@pytest.mark.parametrize("where", [with_model, with_vae])
def test_cudagraph_on_a_cpu_says_what_to_choose(bench: Bench, tiny_prompt: Any, seed: int, where: Any) -> None:
    prompt = tiny_prompt(seed=seed)
    message = failure_of(bench, where(prompt, compile_model("cudagraph") if where is with_model else "cudagraph"))
    assert re.search(r"'cudagraph' cannot run here: .*NVIDIA.*'cpu'", message), message
    assert re.search(r"Choose 'auto'", message), message


@pytest.mark.parametrize(
    ("size", "multiple", "nearest"),
    [((513, 512), "8", "512x512"), ((512, 250), "8", "512x248"), ((520, 512), "16", "528x512")],
)
def test_a_size_that_is_no_multiple_says_which_multiple(
    bench: Bench, tiny_prompt: Any, size: tuple[int, int], multiple: str, nearest: str
) -> None:
    prompt = tiny_prompt()
    prompt["size"] = node("ResoluteResolution", preset="custom", width=size[0], height=size[1], multiple=multiple)
    prompt["latent"]["inputs"].update(width=["size", 0], height=["size", 1])
    message = failure_of(bench, prompt)
    assert "node size" in message.lower(), message
    assert f"{size[0]}x{size[1]}" in message, message
    assert re.search(rf"multiples? of {multiple}\b", message), message
    assert nearest in message, message


def test_a_resolution_that_is_valid_reaches_the_latent(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, steps=1)
    prompt["size"] = node("ResoluteResolution", preset="custom", width=136, height=104, multiple="8")
    prompt["latent"]["inputs"].update(width=["size", 0], height=["size", 1])
    run = bench.run(prompt)
    assert [latent.shape for latent in run.latents] == [(1, 4, 13, 17)]


@pytest.mark.parametrize("shape", ["one forward", "split forward"])
def test_a_model_of_an_unknown_family_runs_as_it_is_and_says_so(
    bench: Bench, tiny_prompt: Any, seed: int, shape: str
) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    prompt["model"] = node("ResoluteTestUnknownModel", shape=shape)
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
    assert_same(ours, expected)
    assert ours.bypasses == {"no_regions": STEPS}
    assert (ours.rise["region_calls"], ours.rise["region_compiles"]) == (0, 0)
    events = bench.client.get("/resolute/events")["events"]
    assert any(event["kind"] == "bypass" and "no_regions" in event["text"] for event in events)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_failure_in_the_middle_of_a_run_is_reported_and_leaves_nothing_behind(
    bench: Bench, tiny_prompt: Any, seed: int, place: str
) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    expected = bench.run(prompt)
    failing = node("ResoluteTestFailingPatch", step=2)
    order = (failing, compile_model()) if place == "before" else (compile_model(), failing)
    message = failure_of(bench, with_model(prompt, *order))
    assert "sample (KSampler)" in message
    assert "asked to fail at step 2" in message
    ours = bench.run(compiled(prompt))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS + 1)


@pytest.mark.usefixtures("warm")
def test_the_original_is_itself_again_after_a_failure(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    expected = bench.run(prompt)
    failure_of(bench, with_model(prompt, compile_model(), node("ResoluteTestFailingPatch", step=1)))
    prompt["sample"]["inputs"]["denoise"] = 0.999999  # the same steps, and no result to take from ComfyUI's cache
    again = bench.run(prompt)
    assert_same(again, expected)
    assert not again.touched_the_cache


@pytest.mark.usefixtures("warm")
def test_a_compiled_prompt_can_be_cancelled_and_the_next_one_is_right(
    bench: Bench, tiny_prompt: Any, seed: int
) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    expected = bench.run(prompt)
    before = bench.counters()["graph_calls"]
    endless = compiled(tiny_prompt(seed=seed, steps=2000))
    message = bench.cancel_once(endless, lambda: bench.counters()["graph_calls"] >= before + 3)
    assert message == "The prompt was interrupted in node sample."
    assert bench.counters()["graph_calls"] < before + 2000
    ours = bench.run(compiled(prompt))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS + 1)
