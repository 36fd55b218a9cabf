"""`POST /resolute/warm-up` with a workflow: ComfyUI runs it with few steps and saves nothing, and then it is ready."""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import PromptError
from scripts.server.process import ComfyServer

from .rig import Bench, PromptDict, Run, assert_same, compiled, node
from .test_warm_up import assert_nothing_new, report, with_controlnet

WITHIN = {"timeout": 300}


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> PromptDict:
    """A workflow with a new model: a small first pass, a larger second pass, and a decode of the second."""
    prompt: PromptDict = tiny_prompt(seed=seed, width=88, height=72, batch=2, steps=5)
    prompt["model"]["inputs"]["seed"] = prompt["vae"]["inputs"]["seed"] = 9000 + seed
    inputs = prompt["sample"]["inputs"]
    prompt["larger"] = node("LatentUpscaleBy", samples=["sample", 0], upscale_method="nearest-exact", scale_by=1.5)
    prompt["second"] = node("KSampler", **{**inputs, "latent_image": ["larger", 0], "denoise": 0.6})
    prompt["decode"]["inputs"]["samples"] = ["second", 0]
    ours = compiled(prompt)
    ours["second"]["inputs"]["model"] = ours["sample"]["inputs"]["model"]
    return ours


def warm_up(bench: Bench, prompt: PromptDict, **more: Any) -> tuple[dict[str, Any], Run]:
    """The route's answer, and the run of the prompt that it queued."""
    before = bench.counters()
    answer: dict[str, Any] = bench.client.post("/resolute/warm-up", {"prompt": prompt, **more})
    return answer, bench.finished(bench.client.wait(answer["prompt_id"], **WITHIN), before)


def test_the_workflow_has_no_new_signature_afterwards(bench: Bench, prompt: PromptDict) -> None:
    answer, run = warm_up(bench, prompt)
    assert answer["unknown"] == []
    assert (run.rise["signatures"], run.rise["region_calls"] > 0) == (3, True)
    assert run.rise["graph_calls"] == 3  # one step of each sampler, and one decode
    assert len(assert_nothing_new(bench, prompt).images) == 2


def test_nothing_is_saved_and_the_history_has_one_report(bench: Bench, server: ComfyServer, prompt: PromptDict) -> None:
    def files() -> set[Path]:
        return {path for name in ("output", "temp") for path in (server.input_folder.parent / name).rglob("*")}

    before = files()
    prompt["shown"] = node("PreviewImage", images=["decode", 0])
    _, run = warm_up(bench, prompt)
    assert files() == before
    assert (run.images, run.latents) == ([], [])
    assert len(run.history["outputs"]) == 1
    lines = report(bench, run).splitlines()
    shown = [re.fullmatch(r"(.*?) +(model|VAE) +(ready|warmed) .*", line) for line in lines[1:4]]
    assert [each.groups()[:2] for each in shown if each] == [
        ("88x72, batch 2", "model"),
        ("128x112, batch 2", "model"),
        ("128x112, batch 2", "VAE"),
    ]
    assert re.match(r"(\d (ready|warmed)(, )?)+; ", lines[4])


def test_its_latents_are_never_taken_for_those_of_the_workflow(bench: Bench, prompt: PromptDict) -> None:
    first = bench.run(prompt)
    warm_up(bench, prompt)
    again = bench.run(prompt)
    assert again.forwards == first.forwards
    assert_same(again, first)


def test_the_loaders_and_compile_nodes_are_shared_with_the_workflow(bench: Bench, prompt: PromptDict) -> None:
    warm_up(bench, prompt)
    history = bench.run(prompt).history
    cached = set(dict(history["status"]["messages"])["execution_cached"]["nodes"])
    assert cached >= {"model", "vae", "positive", "negative", "sample-model-0", "compiled-vae", "latent"}


def test_it_runs_again_although_the_workflow_is_the_same(bench: Bench, prompt: PromptDict) -> None:
    warm_up(bench, prompt)
    _, run = warm_up(bench, prompt)
    assert (run.forwards, run.rise["region_compiles"]) == (3, 0)
    assert "3 ready; " in report(bench, run)


def test_other_sizes_and_batches_can_be_asked_for(bench: Bench, prompt: PromptDict) -> None:
    _, run = warm_up(bench, prompt, sizes="64x64, 128x64", batch_sizes="1, 3")
    firsts = [line.split(" model")[0].strip() for line in report(bench, run).splitlines() if " model " in line][::2]
    assert firsts == ["128x64, batch 3", "64x64, batch 3", "128x64", "64x64"]
    for width, height, batch in ((64, 64, 1), (128, 64, 3)):
        prompt["latent"]["inputs"] |= {"width": width, "height": height, "batch_size": batch}
        assert_nothing_new(bench, prompt)


def test_deepcache_has_both_passes_warmed(bench: Bench, prompt: PromptDict) -> None:
    link = prompt["sample"]["inputs"]["model"]
    prompt["deepcache"] = node("ResoluteDeepCache", model=link, interval=3, depth=2)
    prompt["sample"]["inputs"] |= {"model": ["deepcache", 0], "steps": 12}
    prompt["second"]["inputs"] |= {"model": ["deepcache", 0], "steps": 12, "denoise": 1.0}
    _, run = warm_up(bench, prompt)
    assert run.rise["signatures"] == 5
    assert_nothing_new(bench, prompt)


def test_a_controlnet_that_ends_in_the_middle_is_warmed_on_and_off(bench: Bench, prompt: PromptDict) -> None:
    controlled = with_controlnet(prompt, seed=5, end_percent=0.5)
    warm_up(bench, controlled)
    assert_nothing_new(bench, controlled)


def test_a_picture_whose_size_is_known_only_when_it_is_loaded_is_warmed_too(
    bench: Bench, example_picture: None, prompt: PromptDict
) -> None:
    prompt["picture"] = node("LoadImage", image="example.png")
    prompt["small"] = node("ImageScaleBy", image=["picture", 0], upscale_method="area", scale_by=0.15)
    prompt["encode"] = node("VAEEncode", pixels=["small", 0], vae=["compiled-vae", 0])
    prompt["sample"]["inputs"]["latent_image"] = ["encode", 0]
    warm_up(bench, prompt)
    assert_nothing_new(bench, prompt)


def test_a_sampler_that_is_not_compiled_is_named_and_runs_few_steps(bench: Bench, prompt: PromptDict) -> None:
    prompt["sample"]["inputs"] |= {"model": ["model", 0], "steps": 10_000}
    answer, run = warm_up(bench, prompt)
    assert answer["unknown"] == ["KSampler sample: its model is not compiled. Put Compile Model before it."]
    assert run.forwards == 2


def test_an_error_while_it_runs_names_the_cause(bench: Bench, prompt: PromptDict) -> None:
    prompt["positive"]["inputs"]["width"] = 32  # conditioning for another model
    with pytest.raises(PromptError, match="KSampler"):
        warm_up(bench, prompt)
    prompt["positive"]["inputs"]["width"] = 768
    warm_up(bench, prompt)
    assert_nothing_new(bench, prompt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda prompt: prompt["latent"]["inputs"].update(width=0), "smaller than min"),
        (lambda prompt: prompt.update(latent=node("Mystery")), "Mystery"),
        (lambda prompt: prompt["sample"]["inputs"].update(latent_image=["sample", 0]), "sample"),
        (lambda prompt: prompt["decode"]["inputs"].update(samples=["absent", 0]), "absent"),
    ],
    ids=["a wrong value", "an unknown node", "a cycle", "a link to nothing"],
)
def test_a_workflow_that_comfyui_refuses_is_refused_with_a_sentence(
    bench: Bench, prompt: PromptDict, change: Callable[[PromptDict], None], message: str
) -> None:
    change(prompt)
    with pytest.raises(urllib.error.HTTPError) as caught:
        warm_up(bench, prompt)
    assert caught.value.code == 400
    answer = json.load(caught.value)
    assert answer["error"]["message"]
    assert message in json.dumps(answer)
