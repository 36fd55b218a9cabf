"""A capture that breaks in the middle of a prompt costs no picture: not that one, nor the next ones."""

from __future__ import annotations

import copy

import numpy
import pytest

from ..comfy import rig
from ..conftest import MakeServer

STEPS = 4


@pytest.fixture(scope="module")
def bench(make_server: MakeServer, pytestconfig: pytest.Config) -> rig.Bench:
    return rig.Bench(make_server(cpu=False, arguments=pytestconfig.getoption("--server-argument")).client)


def noisy(sampler: str, seed: int, width: int) -> rig.PromptDict:
    """Text to image, with a sampler that draws noise on the GPU in each step."""
    prompt = rig.tiny_prompt(seed=seed, width=width, steps=STEPS)
    prompt = rig.without_decoder(prompt)
    inputs = prompt["sample"]["inputs"]
    if sampler != "churn":
        inputs["sampler_name"] = sampler
        return prompt
    kept = {name: inputs[name] for name in ("model", "positive", "negative", "latent_image")}
    prompt["sampler"] = rig.node("ResoluteTestChurn")
    prompt["sigmas"] = rig.node("BasicScheduler", model=inputs["model"], scheduler="normal", steps=STEPS, denoise=1.0)
    prompt["sample"] = rig.node(
        "SamplerCustom", add_noise=True, noise_seed=seed, cfg=5.0, sampler=["sampler", 0], sigmas=["sigmas", 0], **kept
    )
    return prompt


# `churn` draws from torch's own generator of the GPU, `euler_ancestral` from one of its own.
@pytest.mark.parametrize("sampler", ["churn", "euler_ancestral"])
def test_a_broken_capture_in_a_prompt_whose_sampler_draws_noise_on_the_gpu(bench: rig.Bench, sampler: str) -> None:
    width = {"churn": 256, "euler_ancestral": 320}[sampler]  # a capture that broke is not tried again
    bench.run(noisy(sampler, 100, width))  # stock's first prompt of a process differs from its later ones
    for number, size in enumerate((width, width, width + 8)):
        prompt = noisy(sampler, 1 + number, size)
        compile_node = rig.compile_model("cudagraph")
        nodes = (rig.node("ResoluteTestBrokenCapture"), compile_node) if number == 0 else (compile_node,)
        plain = bench.run(copy.deepcopy(prompt))
        ours = bench.run(rig.with_model(prompt, *nodes))
        assert numpy.array_equal(ours.latents[0], plain.latents[0]), rig.latent_error(ours.latents[0], plain.latents[0])
        if number < 2:  # the call that broke runs on without a capture
            assert ours.bypasses == {"capture_failed": STEPS}, ours.rise
        else:
            assert ours.rise["replays"] == STEPS - 1, ours.rise
            assert ours.bypasses == {}
