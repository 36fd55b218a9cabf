"""Row 8: models, clones and weights alternate, and share the compiled regions."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from ..rig import (
    Bench,
    PromptDict,
    Run,
    assert_different,
    branches,
    compile_model,
    compiled,
    node,
    with_model,
    without_decoder,
)
from .kit import Check
from .placing import before_and_after, placed

STEPS = 4
PAG = node("PerturbedAttentionGuidance", scale=3.0)
FREE_U = node("FreeU_V2", b1=1.5, b2=1.6, s1=0.7, s2=0.3)
NOTHING = {
    "empty": node("EmptyLatentImage", width=16, height=16, batch_size=1),
    "save": node("ResoluteTestSaveLatent", samples=["empty", 0], filename_prefix="nothing"),
}


class FreesFirst(Bench):
    """Frees ComfyUI's memory before each prompt, like the button in the front end."""

    def __init__(self, bench: Bench, free_memory: bool) -> None:
        super().__init__(bench.client)
        self._free_memory = free_memory

    def run(self, prompt: PromptDict) -> Run:
        self.client.post("/free", {"unload_models": True, "free_memory": self._free_memory})
        # ComfyUI frees memory between two prompts, so run a prompt in between. It contains the nodes of the next prompt
        # without running them; otherwise ComfyUI would drop their results.
        self.client.run({**{name: part for name, part in prompt.items() if name != "samples"}, **NOTHING})
        return super().run(prompt)


def from_cache(run: Run) -> set[str]:
    """The nodes whose results came from ComfyUI's cache."""
    messages = run.history["status"]["messages"]
    return {name for kind, data in messages if kind == "execution_cached" for name in data["nodes"]}


def loads(server: ComfyServer) -> int:
    """Number of times that ComfyUI loaded a model."""
    return server.log().count("Requested to load")


def of_kind(tiny_prompt: Any, kind: str, seed: int) -> PromptDict:
    """Four steps of a tiny model of this kind, without a decoder."""
    whole = tiny_prompt(seed=seed, kind=kind, width=136, height=104, steps=STEPS)
    return without_decoder(whole)


def test_a_second_model_of_one_architecture_compiles_nothing(check: Check, prompt: Any, seeds: Any) -> None:
    first = prompt["model"]["inputs"]["seed"]
    for weights in (21, 22, first):
        prompt["model"]["inputs"]["seed"] = weights
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        check(prompt, forwards=STEPS)
    prompt["model"]["inputs"]["seed"] = 22
    one = check.bench.run(prompt)
    prompt["model"]["inputs"]["seed"] = first
    assert_different(one, check.bench.run(prompt))


@pytest.mark.usefixtures("warm_sdxl")
def test_two_alternating_architectures_compile_nothing(check: Check, tiny_prompt: Any, seeds: Any) -> None:
    for kind in ("sd", "sdxl", "sd", "sdxl"):
        check(of_kind(tiny_prompt, kind, next(seeds)), forwards=STEPS)


@pytest.mark.usefixtures("warm_sdxl")
def test_two_architectures_one_after_the_other_in_one_graph_compile_nothing(
    check: Check, tiny_prompt: Any, seeds: Any
) -> None:
    base, refiner = of_kind(tiny_prompt, "sd", next(seeds)), of_kind(tiny_prompt, "sdxl", next(seeds))
    renamed = {"model": "model-2", "positive": "positive-2", "negative": "negative-2"}
    parts = {renamed[name]: refiner[name] for name in renamed}
    links = {name: [renamed[name], 0] for name in renamed}
    again = {**refiner["sample"]["inputs"], **links, "latent_image": ["sample", 0], "denoise": 0.6}
    plain = {**base, **parts, "again": node("KSampler", **again), "more": copy.deepcopy(base["samples"])}
    plain["more"]["inputs"]["samples"] = ["again", 0]
    ours = compiled(with_model(plain, compile_model(check.backend), sampler="again"), check.backend)
    run = check(plain, ours, forwards=2 * STEPS)
    assert len(run.latents) == 2


@before_and_after
def test_clones_with_different_patches_in_one_graph_do_not_mix(check: Check, prompt: Any, place: str) -> None:
    prompt["other"] = node("ResoluteTestTinyModel", seed=3, kind="sd")
    merge = node("ModelMergeSimple", model2=["other", 0], ratio=0.6)
    wanted: dict[str, list[dict[str, Any]]] = {"a": [], "b": [FREE_U], "c": [PAG], "d": [merge], "e": []}
    wanted["e"] = [node("ModelMergeSimple", model2=["other", 0], ratio=0.2), FREE_U]
    ours = [compile_model(check.backend)]

    def prompt_with(own: bool) -> PromptDict:
        nodes = {name: (list(parts) + ours if place == "before" else ours + parts) for name, parts in wanted.items()}
        built = branches(prompt, nodes if own else wanted)
        for part in built.values():  # the merge node names its first model differently
            if part["class_type"] == "ModelMergeSimple":
                part["inputs"]["model1"] = part["inputs"].pop("model")
        return built

    # Perturbed attention adds a second forward with patched blocks to each step.
    run = check(prompt_with(False), prompt_with(True), forwards=6 * STEPS, bypasses={"patched_block": STEPS})
    for number, one in enumerate(run.latents):
        for other in run.latents[number + 1 :]:
            assert abs(one - other).max() > 0.01, "two branches gave the same result"


def test_an_unloaded_model_is_loaded_again_without_a_compile(check: Check, prompt: Any, server: ComfyServer) -> None:
    check.bench = FreesFirst(check.bench, free_memory=False)
    check.bench.run(prompt)
    before = loads(server)
    run = check(prompt, forwards=STEPS)
    assert "model" in from_cache(run)
    assert loads(server) > before


def test_after_free_memory_the_compiled_blocks_serve_the_reloaded_model(check: Check, prompt: Any, seeds: Any) -> None:
    assert "model" in from_cache(check(prompt, forwards=STEPS))
    check.bench = FreesFirst(check.bench, free_memory=True)
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    run = check(prompt, forwards=STEPS)
    assert not from_cache(run), "nothing was freed"


@pytest.fixture
def merged(prompt: PromptDict, seed: int) -> PromptDict:
    """A prompt with a new model whose weights are all patched by a merge.

    If memory is short, ComfyUI patches the weights that stay off the device in each forward.
    """
    prompt["model"] = node("ResoluteTestOtherModel", seed=seed, kind="sd", channels=0)
    prompt["other"] = node("ResoluteTestTinyModel", seed=3, kind="sd")
    prompt["merge"] = node("ModelMergeSimple", model1=["model", 0], model2=["other", 0], ratio=0.6)
    prompt["sample"]["inputs"]["model"] = ["merge", 0]
    return prompt


@pytest.mark.grid(2)
@pytest.mark.parametrize("kilobytes", [8, 100_000], ids=["some", "all"])
@pytest.mark.parametrize("order", [("in", "out", "in"), ("out", "in", "out", "in")], ids="-".join)
def test_weights_that_are_unloaded_and_reloaded_compile_nothing(
    check: Check, merged: Any, seeds: Any, order: tuple[str, ...], kilobytes: int
) -> None:
    outside = node("ResoluteTestLowVRAM", kilobytes_outside=kilobytes)
    calls: dict[str, int] = {}
    for weights in order:
        merged["sample"]["inputs"]["seed"] = next(seeds)
        if weights == "in":
            run = check(merged, forwards=STEPS)
        else:
            plain, ours = with_model(merged, outside), with_model(merged, outside, compile_model(check.backend))
            eager = 0 if kilobytes == 8 else STEPS  # with all of them outside no block has a region
            bypasses = {"streamed_weights": STEPS}
            run = check(plain, ours, forwards=STEPS - eager, bypasses=bypasses, eager_calls=eager)
        assert check.on_cuda or calls.setdefault(weights, run.rise["region_calls"]) == run.rise["region_calls"]
    if check.backend == "inductor" and not check.on_cuda:
        assert calls["out"] < calls["in"]
        assert (calls["out"] > 0) == (kilobytes == 8)


@before_and_after
def test_weights_unloaded_in_the_middle_of_a_run_compile_nothing(
    check: Check, merged: Any, seeds: Any, place: str
) -> None:
    leaving = [node("ResoluteTestUnloadInTheMiddle", step=1)]
    plain, ours = with_model(merged, *leaving), placed(merged, leaving, place, check.backend)
    check(plain, ours, forwards=1, bypasses={"streamed_weights": STEPS - 1}, eager_calls=STEPS - 1)
    merged["sample"]["inputs"]["seed"] = next(seeds)
    check(merged, forwards=STEPS)
