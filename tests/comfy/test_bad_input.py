"""A user's mistake gets a sentence with the remedy, and the next prompt is not affected."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from scripts.server.process import ComfyServer

from .rig import (
    Bench,
    PromptDict,
    Run,
    assert_different,
    assert_ran_compiled,
    assert_same,
    assert_through_regions,
    compile_model,
    compiled,
    failure_of,
    node,
    with_model,
    with_vae,
)

STEPS = 4


def test_a_size_off_the_multiple_names_the_multiple(bench: Bench, tiny_prompt: Any) -> None:
    prompt = tiny_prompt()
    prompt["size"] = node("ResoluteResolution", preset="custom", width=520, height=512, multiple="16", use="exact")
    prompt["latent"]["inputs"].update(width=["size", 0], height=["size", 1])
    message = failure_of(bench.client, prompt)
    assert "node size" in message.lower(), message
    assert re.search(r"520x512.*multiples? of 16\b.*528x512", message), message


def test_a_size_that_was_typed_wrong_becomes_the_nearest_one(bench: Bench, tiny_prompt: Any) -> None:
    prompt = tiny_prompt()
    prompt["size"] = node("ResoluteResolution", preset="custom", width=137, height=100, multiple="8")
    prompt["latent"]["inputs"].update(width=["size", 0], height=["size", 1])
    run = bench.run(prompt)
    assert [latent.shape[2:] for latent in run.latents] == [(13, 17)]
    assert run.history["outputs"]["size"]["text"] == ["136x104 instead of 137x100: multiples of 8"]


IMAGES = {"image_a": ["picture", 0], "image_b": ["picture", 0], "max_error": 255.0, "min_psnr": 0.0}
STEP_CACHE = {"model": ["model", 0], "interval": 2, "depth": 1, "start_percent": 0.0, "end_percent": 1.0}
SIZES = {"model": ["model", 0], "sizes": "64x64", "batch_sizes": "1", "prompt_chunks": "1", "cfg": 1.0}


@pytest.mark.parametrize(
    ("kind", "inputs", "name"),
    [
        ("ResoluteCompareImages", IMAGES, "max_error"),
        ("ResoluteCompareImages", IMAGES, "min_psnr"),
        ("ResoluteWarmUp", SIZES, "cfg"),
        ("ResoluteDeepCache", STEP_CACHE, "start_percent"),
    ],
)
def test_nan_in_an_input_is_refused_with_its_name(
    bench: Bench, tiny_prompt: Any, kind: str, inputs: dict[str, Any], name: str
) -> None:
    prompt = {
        "model": tiny_prompt()["model"],
        "picture": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
        "checked": node(kind, **{**inputs, name: float("nan")}),
        "shown": node("PreviewAny", source=["checked", 0]),
    }
    assert f"{name} is nan, which is not a number. Type a number." in failure_of(bench.client, prompt)


@pytest.mark.parametrize("used", [True, False], ids=["used", "not used"])
def test_a_checkpoint_without_a_vae_fails_only_where_the_vae_is_used(
    bench: Bench, tiny_prompt: Any, seed: int, used: bool
) -> None:
    prompt = tiny_prompt(seed=seed, steps=1)
    prompt["vae"] = node("ResoluteTestVAE", seed=0, channels=4, layout="none")
    if used:
        assert failure_of(bench.client, with_vae(prompt)) == failure_of(bench.client, prompt)
        return
    warm = {"sizes": "128x128", "batch_sizes": "1", "prompt_chunks": "1", "cfg": 1.0}
    ours = with_vae(with_model(prompt, compile_model()))
    del ours["decode"], ours["image"]
    ours["warm"] = node("ResoluteWarmUp", model=ours["sample"]["inputs"]["model"], vae=["compiled-vae", 0], **warm)
    assert "The VAE is not compiled" in str(bench.client.outputs(bench.run(ours).history, "text"))


@pytest.mark.parametrize("shape", ["one forward", "split forward"])
def test_a_model_of_an_unknown_family_runs_eagerly_and_says_so(
    bench: Bench, tiny_prompt: Any, seed: int, shape: str
) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    prompt["model"] = node("ResoluteTestUnknownModel", shape=shape)
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
    assert_same(ours, expected)
    assert ours.bypasses == {"no_regions": STEPS}
    assert (ours.rise["region_calls"], ours.rise["region_compiles"]) == (0, 0)
    assert any("no_regions" in text for text in bench.texts("bypass"))


@pytest.fixture
def prompt(warm: Run, prompt: PromptDict) -> PromptDict:
    """The shared prompt, already compiled."""
    return prompt


@pytest.fixture(scope="module", autouse=True)
def latents(server: ComfyServer) -> None:
    """Latents for core's LoadLatent: with sixteen channels, of NaN, of a single pixel."""
    kinds = {
        "sixteen-channels": numpy.ones((1, 16, 13, 17)),
        "no-numbers": numpy.full((1, 4, 13, 17), numpy.nan),
        "one-pixel": numpy.arange(4).reshape((1, 4, 1, 1)),
    }
    for name, latent in kinds.items():
        tensors = {"latent_tensor": latent.astype("float32"), "latent_format_version_0": numpy.zeros(0, "float32")}
        save_file(tensors, server.input_folder / f"{name}.latent")


def assert_the_next_prompt_is_right(bench: Bench, prompt: PromptDict, seed: int) -> None:
    """Assert that the prompt with another seed gives ComfyUI's result, without a compile or a bypass."""
    prompt["sample"]["inputs"]["seed"] = seed
    expected, ours = bench.run(prompt), bench.run(compiled(prompt))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)


# Changes of a prompt that cannot work, with ComfyUI's own message.
IMPOSSIBLE = {
    "channels": ({"latent": node("LoadLatent", latent="sixteen-channels.latent")}, "to have 4 channels, but got 16"),
    "text width": (
        {"positive": node("ResoluteTestConditioning", seed=1, tokens=77, width=2048, pooled_width=0, batch=1)},
        "mat1 and mat2 shapes cannot be multiplied (77x2048 and 768x32)",
    ),
    "text length": ({"positive": node("ResoluteTestEmptyConditioning", kind="no token")}, "ZeroDivisionError"),
    "pooled": ({"model": node("ResoluteTestTinyModel", seed=0, kind="sdxl")}, "KeyError: 'pooled_output'"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_an_impossible_prompt_gets_comfyuis_own_message_and_the_next_one_works(
    bench: Bench, prompt: PromptDict, seeds: Any, kind: str
) -> None:
    changes, expected = IMPOSSIBLE[kind]
    message = failure_of(bench.client, prompt | changes)
    assert expected in message
    assert failure_of(bench.client, compiled(prompt | changes)) == message
    assert_the_next_prompt_is_right(bench, prompt, next(seeds))


def test_a_text_for_another_model_does_not_affect_later_compiles(bench: Bench, prompt: PromptDict, seeds: Any) -> None:
    # This is the first prompt of an architecture, so that its blocks get the wrong text before the right one.
    prompt["model"] = node("ResoluteTestOtherModel", seed=1, kind="attentive", channels=160)
    changes, _ = IMPOSSIBLE["text width"]
    message = failure_of(bench.client, prompt | changes)
    assert failure_of(bench.client, compiled(prompt | changes)) == message
    expected, ours = bench.run(prompt), bench.run(compiled(prompt))
    assert_same(ours, expected)
    assert_through_regions(ours, STEPS)
    assert_the_next_prompt_is_right(bench, prompt, next(seeds))


@pytest.mark.parametrize("model", ["known", "new"])
def test_latents_of_nan_stay_nan_and_the_next_prompt_works(
    bench: Bench, prompt: PromptDict, seeds: Any, model: str
) -> None:
    if model == "new":
        prompt["model"] = node("ResoluteTestOtherModel", seed=1, kind="short", channels=192)
    spoilt = prompt | {"latent": node("LoadLatent", latent="no-numbers.latent")}
    for run in (bench.run(spoilt), bench.run(compiled(spoilt))):
        assert numpy.isnan(run.latents[0]).all()
    if model == "new":  # no comparison of such values shows anything, so its code is not compared, and does not run
        assert run.rise["region_compiles"] == run.rise["region_calls"] == 0
        run = bench.run(compiled(prompt))
        assert run.rise["region_compiles"] > 0
    assert_through_regions(run, STEPS)
    assert_the_next_prompt_is_right(bench, prompt, next(seeds))


def test_a_latent_of_one_pixel_gives_comfyuis_result_and_affects_nothing(
    bench: Bench, prompt: PromptDict, seeds: Any
) -> None:
    # Normalizing a single value leaves only rounding noise, so two correct computations may differ completely.
    small = prompt | {"latent": node("LoadLatent", latent="one-pixel.latent")}
    expected, ours = bench.run(small), bench.run(compiled(small))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)
    assert_the_next_prompt_is_right(bench, prompt, next(seeds))


def test_an_empty_list_of_texts_gives_comfyuis_own_image(bench: Bench, prompt: PromptDict, seeds: Any) -> None:
    without = prompt | {"positive": node("ResoluteTestEmptyConditioning", kind="no entry")}
    untouched, expected, ours = bench.run(prompt), bench.run(without), bench.run(compiled(without))
    assert_different(expected, untouched)
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)
    assert_the_next_prompt_is_right(bench, prompt, next(seeds))


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_control_residual_of_a_wrong_size_is_left_out_as_in_comfyui(
    bench: Bench, server: ComfyServer, prompt: PromptDict, seeds: Any, place: str
) -> None:
    warning = "control could not be applied"
    # The middle of a latent of 17x13 is 5x4.
    fits, odd = (node("ResoluteTestResidual", width=width, height=height) for width, height in [(5, 4), (9, 3)])
    untouched = bench.run(prompt)
    for residual in (fits, odd):
        expected = bench.run(with_model(prompt, residual))
        before = server.log().count(warning)
        order = (residual, compile_model()) if place == "before" else (compile_model(), residual)
        ours = bench.run(with_model(prompt, *order))
        assert_same(ours, expected)
        assert_ran_compiled(ours, STEPS)
        if residual is fits:
            assert_different(ours, untouched)
        else:
            assert_same(ours, untouched)
            assert server.log().count(warning) == before + STEPS
    assert_the_next_prompt_is_right(bench, prompt, next(seeds))
