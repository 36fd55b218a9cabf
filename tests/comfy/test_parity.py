"""The compiled model and VAE give ComfyUI's own images, and only the first prompt compiles."""

from __future__ import annotations

from typing import Any

import pytest

from .rig import (
    Bench,
    Run,
    assert_ran_compiled,
    assert_same,
    assert_through_regions,
    compile_model,
    compiled,
    with_model,
)

STEPS = 4
FORWARDS = STEPS + 1  # one of them is the decoder's

# Odd latents: 264x200 is 33x25; 240x360 is 30x45, where half of 45 rounds up to 23, and doubles to 46, as at 720x960.
CASES = [
    (256, 256, 2),
    (256, 256, 3),
    (264, 200, 1),
    (264, 200, 2),
    (264, 200, 3),
    (240, 360, 1),
    (240, 360, 2),
    (360, 240, 1),
    (64, 512, 1),
    (72, 64, 3),
]


def assert_parity(bench: Bench, prompt: Any, forwards: int = FORWARDS) -> None:
    plain, ours = bench.run(prompt), bench.run(compiled(prompt))
    assert not plain.touched_the_cache
    assert_same(ours, plain)
    assert_ran_compiled(ours, forwards)


def test_the_second_prompt_compiles_nothing(bench: Bench, warm: Run, tiny_prompt: Any, seed: int) -> None:
    assert_through_regions(warm, FORWARDS)
    assert_parity(bench, tiny_prompt(seed=seed))


@pytest.mark.grid(2)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("width", "height", "batch"), CASES)
def test_another_size_or_batch_compiles_nothing(
    bench: Bench, tiny_prompt: Any, seed: int, width: int, height: int, batch: int
) -> None:
    assert_parity(bench, tiny_prompt(seed=seed, width=width, height=height, batch=batch))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("width", "height", "batch"), [(256, 256, 1), (264, 200, 2), (120, 180, 3)])
def test_a_longer_text_compiles_nothing(
    bench: Bench, tiny_prompt: Any, seed: int, width: int, height: int, batch: int
) -> None:
    assert_parity(bench, tiny_prompt(seed=seed, width=width, height=height, batch=batch, tokens=154))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("tokens", [(154, 77), (231, 154)])
def test_texts_of_unequal_length_compile_nothing(
    bench: Bench, tiny_prompt: Any, seed: int, tokens: tuple[int, int]
) -> None:
    prompt = tiny_prompt(seed=seed)
    prompt["positive"]["inputs"]["tokens"], prompt["negative"]["inputs"]["tokens"] = tokens
    assert_parity(bench, prompt)


@pytest.mark.usefixtures("warm")
def test_without_guidance_the_batch_of_one_compiles_nothing(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    # With a cfg of 1 ComfyUI skips the negative prompt, so the model's batch is one.
    assert_parity(bench, tiny_prompt(seed=seed, cfg=1.0))


@pytest.mark.usefixtures("warm")
def test_more_steps_and_another_sampler_compile_nothing(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, steps=7)
    prompt["sample"]["inputs"].update(sampler_name="dpmpp_2m", scheduler="karras")
    assert_parity(bench, prompt, forwards=8)


@pytest.mark.usefixtures("warm")
def test_other_weights_of_the_same_architecture_compile_nothing(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed)
    prompt["model"]["inputs"]["seed"] = prompt["vae"]["inputs"]["seed"] = 1
    assert_parity(bench, prompt)


@pytest.mark.usefixtures("warm")
def test_tiled_decoding_compiles_nothing(bench: Bench, tiny_prompt: Any, node: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, width=264, height=200)
    tiles = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    prompt["decode"] = node("VAEDecodeTiled", samples=["sample", 0], vae=["vae", 0], **tiles)
    plain, ours = bench.run(prompt), bench.run(compiled(prompt))
    assert_same(ours, plain)
    assert ours.rise["graph_calls"] > FORWARDS  # one per tile
    assert_ran_compiled(ours, ours.rise["graph_calls"])


@pytest.mark.usefixtures("warm")
def test_sdxl_compiles_only_in_its_first_prompt(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    first = tiny_prompt(kind="sdxl", seed=seed)
    plain, ours = bench.run(first), bench.run(compiled(first))
    assert_same(ours, plain)
    assert_through_regions(ours, FORWARDS)  # compiled here or by another test on this server
    for width, height, batch, tokens in [(264, 200, 1, 77), (120, 180, 2, 154), (128, 128, 3, 77)]:
        prompt = tiny_prompt(kind="sdxl", seed=seed, width=width, height=height, batch=batch, tokens=tokens)
        assert_parity(bench, prompt)


def test_flux_compiles_only_in_its_first_prompt(
    bench: Bench, make_model: Any, tiny_prompt: Any, node: Any, seed: int
) -> None:
    name = make_model("flux-tiny")

    def flux(width: int, height: int, batch: int, tokens: int) -> Any:
        prompt = tiny_prompt(cfg=1.0, steps=STEPS, seed=seed, tokens=tokens)
        prompt["model"] = node("UNETLoader", unet_name=name, weight_dtype="default")
        for key in ("positive", "negative"):
            prompt[key]["inputs"].update(width=4096, pooled_width=768)
        prompt["latent"] = node("EmptySD3LatentImage", width=width, height=height, batch_size=batch)
        del prompt["decode"], prompt["image"]
        return prompt

    for number, case in enumerate([(128, 128, 1, 77), (176, 112, 1, 77), (144, 208, 2, 154), (128, 128, 3, 77)]):
        prompt = flux(*case)
        plain, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
        assert_same(ours, plain)
        assert_through_regions(ours, STEPS)
        assert number == 0 or ours.rise["region_compiles"] == 0
