"""Every bundled workflow on a real server: compiled equals eager, and only the first prompt compiles."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.demonstration.plan import TOUR_NAME, Job, prompt_for
from scripts.places import ROOT

from .rig import Bench, PromptDict, assert_ran_compiled, assert_same, assert_through_regions, node

STEPS = 2
ELSEWHERE = {
    "deepcache", "deepcache_controlnet", "lcm_image_to_image",  # deepcache/test_workflows.py
    "oneflow_text_to_image",  # tests/oneflow/test_workflow.py
    # test_family_workflows.py
    "flux_dev_text_to_image", "hunyuan_video15_text_to_video", "ltx2_text_to_video", "ltx_text_to_video",
    "minimax_h3_text_to_video", "qwen_image_edit", "qwen_image_text_to_image", "wan22_image_to_video",
    "wan22_text_to_video", "z_image_turbo_faster_format_text_to_image", "z_image_turbo_int8_text_to_image",
    "z_image_turbo_text_to_image",
}  # fmt: skip
WORKFLOWS = sorted({path.stem for path in (ROOT / "workflows" / "api").glob("*.json")} - ELSEWHERE)
# image_to_image encodes an image, and the small VAE has no encoder.
CHECKPOINTS = {
    "sd15_text_to_image": "sd15-mini",
    "resolution_tour": "sd15-mini",
    "image_to_image": "sd15-mini-full-vae",
    "sdxl_text_to_image": "sdxl-mini",
    "compare_with_stock": "sd15-mini",
}
# Images saved per size: this workflow samples twice, and only one of the two runs through the cache.
PICTURES = {"compare_with_stock": 2}


def job_of(workflow: str) -> Job:
    """A latent of 17x13 and a text of 154 tokens. The tour has five sizes, as small as a CPU needs them."""
    if workflow == TOUR_NAME:
        return Job(workflow, ((120, 96), (112, 96), (96, 96), (80, 120), (88, 72)), tokens=77)
    return Job(workflow, ((136, 104),), tokens=154)


def saved(prompt: PromptDict) -> PromptDict:
    """The prompt, which also saves the latents of each sampler."""
    samplers = [name for name, part in prompt.items() if part["class_type"] == "KSampler"]
    for name in samplers:
        prompt[f"{name}-latent"] = node("ResoluteTestSaveLatent", samples=[name, 0], filename_prefix="workflow")
    return prompt


def with_stand_ins_for_text(prompt: PromptDict, tokens: int) -> PromptDict:
    """Replace SDXL's text encoders, which are gigabytes, by random embeddings of the same shape."""
    texts = [name for name, part in prompt.items() if part["class_type"] == "CLIPTextEncode"]
    for seed, name in enumerate(texts):
        shape = {"tokens": tokens, "width": 2048, "pooled_width": 1280, "batch": 1}
        prompt[name] = node("ResoluteTestConditioning", seed=seed, **shape)
    return prompt


def test_every_bundled_workflow_is_run_here() -> None:
    assert sorted(CHECKPOINTS) == WORKFLOWS


@pytest.mark.usefixtures("example_picture")
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_bundled_workflow_is_right_and_compiles_in_its_first_prompt_only(
    bench: Bench, make_model: Any, seed: int, workflow: str
) -> None:
    job, checkpoint = job_of(workflow), make_model(CHECKPOINTS[workflow])

    def prompt(backend: str | None, its_seed: int) -> PromptDict:
        built = saved(prompt_for(job, checkpoint, backend, its_seed, STEPS))
        return with_stand_ins_for_text(built, job.tokens) if workflow.startswith("sdxl") else built

    # Pictures are encoded through Compile VAE too, once: ComfyUI keeps the result for other seeds.
    encodes = sum(part["class_type"] == "VAEEncode" for part in prompt(None, seed).values())
    later = len(job.sizes) * (STEPS + 1)
    forwards = later + encodes
    eager = bench.run(prompt("eager", seed))
    assert (eager.rise["eager_calls"], eager.rise["graph_calls"]) == (forwards, 0)
    # None keeps the file's backend, `auto`.
    first = bench.run(prompt(None, seed))
    assert_same(first, eager)
    assert_through_regions(first, forwards)
    second, eager_second = bench.run(prompt(None, seed + 10_000)), bench.run(prompt("eager", seed + 10_000))
    assert_ran_compiled(second, later)
    assert_same(second, eager_second)
    pictures = len(job.sizes) * PICTURES.get(workflow, 1)
    assert len(first.latents) == pictures
    assert len(first.images) == pictures * job.batch
