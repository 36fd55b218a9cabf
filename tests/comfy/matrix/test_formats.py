"""Row 7: formats of weights. Each format is compiled once; changing between formats compiles nothing.

On the CPU, core computes all formats in fp32 and casts weights in each forward; the regions include the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..rig import (
    LATENT_TOLERANCE,
    PromptDict,
    Run,
    compile_model,
    flux_prompt,
    latent_error,
    node,
    with_model,
    without_decoder,
)
from .kit import Check

STEPS = 3
FORMATS = ("fp32", "fp16", "bf16", "fp8_e4m3fn")
CASTED = FORMATS[1:]
FLUX_FORMATS = ("default", "fp8_e4m3fn", "fp8_e5m2")

# Makes a family's prompt from (weights, width, height, batch), each with a new seed.
MakePrompt = Callable[..., PromptDict]


@pytest.fixture
def unet(tiny_prompt: Any, seeds: Any) -> MakePrompt:
    """Prompts with the model of `pack/formats.py`, an SD1.5 UNet with each kind of block once."""

    def make(weights: str, width: int = 136, height: int = 104, batch: int = 1) -> PromptDict:
        prompt = tiny_prompt(seed=next(seeds), width=width, height=height, batch=batch, steps=STEPS)
        prompt["model"] = node("ResoluteTestFormatModel", seed=0, weights=weights)
        return without_decoder(prompt)

    return make


@pytest.fixture
def flux(tiny_prompt: Any, seeds: Any, make_model: Any) -> MakePrompt:
    """Prompts with a tiny Flux from a file, loaded by core's own loader."""
    name = make_model("flux-tiny")

    def make(weights: str, width: int = 144, height: int = 112, batch: int = 1) -> PromptDict:
        prompt = flux_prompt(tiny_prompt(seed=next(seeds), steps=STEPS), name, width, height, batch)
        prompt["model"]["inputs"]["weight_dtype"] = weights
        return prompt

    return make


def first_prompt(check: Check, prompt: PromptDict) -> Run:
    """Run a prompt that may compile, depending on what the session ran before."""
    run = check.bench.run(with_model(prompt, compile_model(check.backend)))
    assert run.rise["compile_failures"] == 0
    return run


def check_that_formats_differ(check: Check, prompt: PromptDict, other: PromptDict) -> None:
    """Check that two formats give different images in stock ComfyUI, so that confusing them would be visible."""
    other = {**other, "sample": {**other["sample"], "inputs": dict(prompt["sample"]["inputs"])}}
    one, two = check.bench.run(prompt), check.bench.run(other)
    assert latent_error(two.latents[0], one.latents[0]) > 2 * LATENT_TOLERANCE


@pytest.mark.grid(2)
@pytest.mark.parametrize("weights", FORMATS)
def test_a_format_compiles_in_its_first_prompt_only(check: Check, unet: MakePrompt, weights: str) -> None:
    first = first_prompt(check, unet(weights, 128, 128))
    for width, height, batch in [(136, 104, 1), (72, 120, 3), (128, 128, 1)]:
        run = check(unet(weights, width, height, batch), forwards=STEPS)
        if check.backend == "inductor" and not run.rise["replays"]:
            assert run.rise["region_calls"] == first.rise["region_calls"] > 0


@pytest.mark.parametrize("weights", CASTED)
def test_a_format_is_never_confused_with_another(check: Check, unet: MakePrompt, weights: str) -> None:
    for other in FORMATS:
        if other != weights:
            check_that_formats_differ(check, unet(weights), unet(other))


def test_changes_between_formats_compile_nothing_in_any_order(check: Check, unet: MakePrompt) -> None:
    for weights in FORMATS:
        first_prompt(check, unet(weights, 128, 128))
    sizes = [(136, 104), (104, 136), (88, 168)]
    for number, weights in enumerate(("fp8_e4m3fn", "fp16", "fp32", "bf16", "fp16", "fp8_e4m3fn", "fp32")):
        check(unet(weights, *sizes[number % len(sizes)]), forwards=STEPS)


def test_two_formats_in_one_prompt_compile_nothing(check: Check, unet: MakePrompt) -> None:
    prompt = unet("fp16")
    prompt["other-model"] = node("ResoluteTestFormatModel", seed=0, weights="fp8_e4m3fn")
    again = {**prompt["sample"]["inputs"], "model": ["other-model", 0], "latent_image": ["sample", 0], "denoise": 0.5}
    prompt["again"] = node("KSampler", **again)
    prompt["samples"]["inputs"]["samples"] = ["again", 0]
    for weights in ("fp16", "fp8_e4m3fn"):
        first_prompt(check, unet(weights, 128, 128))
    ours = with_model(prompt, compile_model(check.backend))
    check(prompt, with_model(ours, compile_model(check.backend), sampler="again"), forwards=2 * STEPS)


@pytest.mark.grid(1)
@pytest.mark.parametrize("weights", reversed(FLUX_FORMATS))  # without --long the last one: as the file has them
def test_the_loaders_formats_of_flux_compile_in_their_first_prompt_only(
    check: Check, flux: MakePrompt, weights: str
) -> None:
    first_prompt(check, flux(weights, 128, 128))
    for width, height, batch in [(144, 112, 1), (72, 136, 2), (128, 128, 1)]:
        check(flux(weights, width, height, batch), forwards=STEPS)


@pytest.mark.long
def test_changes_between_the_loaders_formats_of_flux_compile_nothing(check: Check, flux: MakePrompt) -> None:
    for weights in FLUX_FORMATS:
        first_prompt(check, flux(weights, 128, 128))
    check_that_formats_differ(check, flux("default"), flux("fp8_e4m3fn"))
    check_that_formats_differ(check, flux("fp8_e4m3fn"), flux("fp8_e5m2"))
    for weights in ("fp8_e5m2", "default", "fp8_e4m3fn", "default", "fp8_e5m2"):
        check(flux(weights), forwards=STEPS)


@pytest.mark.grid(1)
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_model_that_is_quantized_when_it_is_loaded_compiles_in_its_first_prompt_only(
    check: Check, flux: MakePrompt, weights: str
) -> None:
    def quantized(width: int, height: int, batch: int = 1) -> PromptDict:
        prompt = flux("default", width, height, batch)
        name = prompt["model"]["inputs"]["unet_name"]
        prompt["model"] = node("ResoluteLoadDiffusionModel", unet_name=name, format=weights, keep=False)
        return prompt

    first_prompt(check, quantized(128, 128))
    for width, height, batch in [(144, 112, 1), (72, 136, 2)]:
        prompt = quantized(width, height, batch)
        ours, stock = check.bench.run(with_model(prompt, compile_model(check.backend))), check.bench.run(prompt)
        assert latent_error(ours.latents[0], stock.latents[0]) < 5e-3  # int8 rounds its inputs: a step of 1 in 127
        assert (ours.rise["region_compiles"], ours.rise["eager_calls"]) == (0, 0)
        assert ours.rise["region_calls"] > 0
