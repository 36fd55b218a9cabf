"""The oldest supported ComfyUI: every node is registered, and a bundled workflow runs compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.demonstration.plan import Job, prompt_for
from scripts.server.process import ComfyServer

from .rig import Bench, PromptDict, assert_ran_compiled, assert_same, assert_through_regions, compiled

pytestmark = pytest.mark.old

STEPS = 2
NODES = {
    "ResoluteCompileModel": "Compile Model",
    "ResoluteCompileVAEDecode": "Compile VAE Decode",
    "ResoluteLoadCheckpoint": "Load Checkpoint (Compiled)",
    "ResoluteResolution": "Resolution",
    "ResoluteCompileControlNet": "Compile ControlNet",
    "ResoluteDeepCache": "DeepCache",
    "ResoluteReport": "Graph Cache Report",
    "ResoluteCompareImages": "Compare Images (PSNR, Heat Map)",
    "ResoluteFree": "Free Graphs",
    "ResoluteWarmUp": "Warm Up",
}


@pytest.fixture
def small_prompt(tiny_prompt: Any, seed: int) -> Callable[..., PromptDict]:
    """Prompts with a UNet of one level: a model of which fewer regions compile."""

    def make(**settings: int) -> PromptDict:
        prompt: PromptDict = tiny_prompt(seed=seed, **settings)
        prompt["model"]["inputs"]["kind"] = "small"
        return prompt

    return make


@pytest.fixture(scope="module")
def old(old_server: ComfyServer) -> Bench:
    return Bench(old_server.client)


def test_every_node_is_registered(old: Bench, old_server: ComfyServer) -> None:
    known = old.client.get("/object_info")
    assert {name: known[name]["display_name"] for name in NODES if name in known} == NODES
    assert "IMPORT FAILED" not in old_server.log()


def test_a_bundled_workflow_is_right_and_compiles_in_its_first_prompt_only(
    old: Bench, make_model: Any, node: Any, seed: int
) -> None:
    job = Job("sd15_text_to_image", ((136, 104),))
    checkpoint = make_model("sd15-mini-full-vae")

    def prompt(backend: str | None, its_seed: int) -> Any:
        built = prompt_for(job, checkpoint, backend, its_seed, STEPS)
        sampler = next(name for name, part in built.items() if part["class_type"] == "KSampler")
        built["latent"] = node("ResoluteTestSaveLatent", samples=[sampler, 0], filename_prefix="old")
        return built

    eager, first = old.run(prompt("eager", seed)), old.run(prompt(None, seed))
    assert_same(first, eager)
    assert_through_regions(first, STEPS + 1)
    assert first.rise["region_compiles"] > 0
    eager, second = old.run(prompt("eager", seed + 10_000)), old.run(prompt(None, seed + 10_000))
    assert_same(second, eager)
    assert_ran_compiled(second, STEPS + 1)


def test_the_nodes_without_a_model_work(old: Bench, tiny_prompt: Any, node: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, steps=1)
    prompt["size"] = node("ResoluteResolution", preset="custom", width=136, height=104, multiple="8")
    prompt["latent"]["inputs"].update(width=["size", 0], height=["size", 1])
    prompt["free"] = node("ResoluteFree", any=["decode", 0])
    prompt["report"] = node("ResoluteReport", any=["free", 0])
    prompt["compare"] = node(
        "ResoluteCompareImages", image_a=["free", 0], image_b=["decode", 0], max_error=0, min_psnr=99
    )
    run = old.run(prompt)
    assert [latent.shape for latent in run.latents] == [(1, 4, 13, 17)]
    assert "identical" in run.history["outputs"]["compare"]["text"][0]
    assert "region compiles" in run.history["outputs"]["report"]["text"][0]


def test_a_compiled_prompt_can_be_cancelled_and_the_next_one_is_right(old: Bench, small_prompt: Any) -> None:
    prompt = small_prompt(steps=STEPS, width=136, height=104)
    expected = old.run(prompt)
    before = old.counters()["graph_calls"]
    endless = compiled(small_prompt(steps=2000, width=136, height=104))
    message = old.cancel_once(endless, lambda: old.counters()["graph_calls"] >= before + 3)
    assert message == "The prompt was interrupted in node sample."
    ours = old.run(compiled(prompt))
    assert_same(ours, expected)
    assert_through_regions(ours, STEPS + 1)


def test_after_warm_up_nothing_is_new(old: Bench, small_prompt: Any, node: Any) -> None:
    prompt = compiled(small_prompt(steps=STEPS, width=72, height=88))
    links = {"model": prompt["sample"]["inputs"]["model"], "vae": prompt["decode"]["inputs"]["vae"]}
    dropped = ("sample", "decode", "image", "samples", "latent")
    warming = {name: each for name, each in prompt.items() if name not in dropped}
    values = {"sizes": "72x88", "batch_sizes": "1", "prompt_chunks": "1", "cfg": 5.0}
    warming["warm"] = node("ResoluteWarmUp", **links, **values)
    assert old.run(warming).rise["graph_calls"] == 2
    assert old.run(prompt).rise["signatures"] == 0
