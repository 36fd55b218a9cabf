"""Warm Up on a real server: later prompts of these shapes are ready, it reports its work, and it can be cancelled."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts.errors import PromptError

from .rig import Bench, PromptDict, Run, compile_model, node, with_model, with_sampling, with_vae

SIZES = [(128, 128), (136, 72), (64, 192)]
LIST = ", ".join(f"{width}x{height}" for width, height in SIZES)


@pytest.fixture(scope="module")
def models() -> Any:
    """Seeds of models that no other test uses, so that each model has no signature yet."""
    return iter(range(7000, 8000))


@pytest.fixture
def prompt(models: Any, tiny_prompt: Any, seed: int) -> PromptDict:
    """A new model and decoder, compiled."""
    prompt: PromptDict = tiny_prompt(seed=seed, steps=2)
    prompt["model"]["inputs"]["seed"] = prompt["vae"]["inputs"]["seed"] = next(models)
    return with_vae(with_model(prompt, compile_model()))


def warming(prompt: PromptDict, sizes: str = LIST, vae: bool = True, **inputs: Any) -> PromptDict:
    """The prompt's loaders and compile nodes, with Warm Up in place of the sampler and the decoder."""
    inputs = {
        "batch_sizes": "1",
        "prompt_chunks": "1",
        "cfg": 5.0,
        "model": prompt["sample"]["inputs"]["model"],
        **inputs,
    }
    if vae:
        inputs["vae"] = ["compiled-vae", 0]
    dropped = ("sample", "decode", "image", "samples", "latent")
    kept = {name: each for name, each in prompt.items() if name not in dropped}
    return {**kept, "warm": node("ResoluteWarmUp", sizes=sizes, **inputs)}


def report(bench: Bench, run: Run) -> str:
    (text,) = bench.client.outputs(run.history, "text")
    return str(text)


def states(text: str) -> list[tuple[str, str]]:
    """(what, state) of each line of a report."""
    return re.findall(r" (model|VAE) +(ready|warmed|failed) ", text)


def sized(prompt: PromptDict, width: int, height: int, batch: int = 1) -> PromptDict:
    return {**prompt, "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch)}


def with_controlnet(prompt: PromptDict, seed: int, end_percent: float = 1.0) -> PromptDict:
    """The prompt with a compiled ControlNet of this seed on positive and negative."""
    links = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["compiled-net", 0]}
    values = {"strength": 1.0, "start_percent": 0.0, "end_percent": end_percent}
    changed = {
        **prompt,
        "net": node("ResoluteTestControlNet", kind="sd", seed=seed),
        "compiled-net": node("ResoluteCompileControlNet", control_net=["net", 0], backend="inductor"),
        "hint": node("ResoluteTestHint", seed=5, width=128, height=128, batch=1, channels=3),
        "apply": node("ControlNetApplyAdvanced", image=["hint", 0], **links, **values),
    }
    return with_sampling(changed, positive=["apply", 0], negative=["apply", 1])


def assert_nothing_new(bench: Bench, prompt: PromptDict) -> Run:
    run = bench.run(prompt)
    new = bench.texts("signature")[-run.rise["signatures"] :]
    assert (run.rise["signatures"], run.rise["region_compiles"]) == (0, 0), new
    assert run.forwards > 1
    return run


def test_a_prompt_without_a_warm_up_has_new_signatures(bench: Bench, prompt: PromptDict) -> None:
    assert bench.run(sized(prompt, *SIZES[0])).rise["signatures"] == 2


def test_after_a_warm_up_no_shape_is_new(bench: Bench, prompt: PromptDict) -> None:
    run = bench.run(warming(prompt, batch_sizes="1, 3"))
    assert run.rise["signatures"] == 2 * 2 * len(SIZES)
    assert states(report(bench, run)) == [("model", "warmed"), ("VAE", "warmed")] * 2 * len(SIZES)
    for width, height in SIZES:
        for batch in (1, 3):
            assert_nothing_new(bench, sized(prompt, width, height, batch))


def test_the_model_output_samples_like_the_model_input(bench: Bench, prompt: PromptDict) -> None:
    through = warming(prompt, sizes="128x128")
    whole = with_sampling({**prompt, "warm": through["warm"]}, model=["warm", 0])
    whole["decode"] = node("VAEDecode", samples=["sample", 0], vae=["warm", 1])
    run = bench.run(sized(whole, 128, 128))
    assert len(run.images) == len(run.latents) == 1
    again = bench.run(sized(prompt, 128, 128))  # the sampler's inputs differ, so ComfyUI samples again
    assert (run.latents[0] == again.latents[0]).all()


class TestAgain:
    def test_ready_shapes_are_skipped(self, bench: Bench, prompt: PromptDict) -> None:
        bench.run(warming(prompt))
        run = bench.run(warming(prompt))
        assert states(report(bench, run)) == [("model", "ready"), ("VAE", "ready")] * len(SIZES)
        assert not run.touched_the_cache

    def test_only_missing_shapes_are_warmed(self, bench: Bench, prompt: PromptDict) -> None:
        bench.run(warming(prompt, sizes="128x128", vae=False))
        run = bench.run(warming(prompt, sizes="128x128, 64x64", vae=False))
        assert states(report(bench, run)) == [("model", "ready"), ("model", "warmed")]


class TestConditioning:
    @pytest.mark.parametrize("kind", ["sd", "sdxl"])
    def test_dummies_have_the_shape_of_real_conditioning(
        self, bench: Bench, tiny_prompt: Any, seed: int, models: Any, kind: str
    ) -> None:
        prompt = tiny_prompt(seed=seed, steps=2, kind=kind)
        prompt["model"]["inputs"]["seed"] = next(models)
        prompt = with_vae(with_model(prompt, compile_model()))
        bench.run(warming(prompt, prompt_chunks="1, 2", sizes="128x128"))
        for tokens in (77, 154):
            for side in ("positive", "negative"):
                prompt[side]["inputs"]["tokens"] = tokens
            assert_nothing_new(bench, sized(prompt, 128, 128))

    def test_connected_conditioning_decides_the_length(self, bench: Bench, prompt: PromptDict) -> None:
        prompt["positive"]["inputs"]["tokens"] = 231
        bench.run(warming(prompt, sizes="128x128", positive=["positive", 0], negative=["negative", 0]))
        assert_nothing_new(bench, sized(prompt, 128, 128))

    def test_at_a_cfg_of_1_there_is_no_negative(self, bench: Bench, prompt: PromptDict) -> None:
        bench.run(warming(prompt, sizes="128x128", cfg=1.0))
        prompt["sample"]["inputs"]["cfg"] = 1.0
        assert_nothing_new(bench, sized(prompt, 128, 128))

    def test_a_positive_alone_is_refused(self, bench: Bench, prompt: PromptDict) -> None:
        with pytest.raises(PromptError, match="Connect positive and negative, or neither"):
            bench.run(warming(prompt, positive=["positive", 0]))


class TestMore:
    def test_deepcache_has_both_passes_warmed(self, bench: Bench, prompt: PromptDict) -> None:
        prompt["deepcache"] = node("ResoluteDeepCache", model=prompt["sample"]["inputs"]["model"], interval=3, depth=2)
        prompt["sample"]["inputs"].update(model=["deepcache", 0], steps=12)
        run = bench.run(warming(prompt, sizes="128x128", vae=False))
        assert run.rise["signatures"] == 2
        prompt["decode"]["inputs"]["vae"] = ["vae", 0]
        assert_nothing_new(bench, sized(prompt, 128, 128))

    def test_a_controlnet_that_ends_in_the_middle_is_warmed_on_and_off(self, bench: Bench, prompt: PromptDict) -> None:
        controlled = with_controlnet(prompt, seed=3, end_percent=0.5)
        controlled["sample"]["inputs"]["steps"] = 4
        conditioning = {side: controlled["sample"]["inputs"][side] for side in ("positive", "negative")}
        bench.run(warming(controlled, sizes="128x128", **conditioning))
        assert_nothing_new(bench, sized(controlled, 128, 128))

    def test_a_connected_controlnet_is_applied_to_the_conditioning(self, bench: Bench, prompt: PromptDict) -> None:
        controlled = with_controlnet(prompt, seed=4)
        run = bench.run(warming(controlled, sizes="128x128", control_net=["compiled-net", 0]))
        assert run.rise["signatures"] == 3  # UNet, ControlNet and decoder
        assert_nothing_new(bench, sized(controlled, 128, 128))

    def test_the_tiles_of_the_tiled_decoder_are_warmed(self, bench: Bench, prompt: PromptDict) -> None:
        bench.run(warming(prompt, sizes="192x128", tile_size=64, overlap=16))
        tiled = sized(prompt, 192, 128)
        tiled["decode"] = node(
            "VAEDecodeTiled", samples=["sample", 0], vae=["compiled-vae", 0], tile_size=64, overlap=16
        )
        tiled["decode"]["inputs"].update(temporal_size=64, temporal_overlap=8)
        assert_nothing_new(bench, tiled)


class TestFailures:
    def test_a_failed_shape_is_reported_and_the_others_go_on(self, bench: Bench, prompt: PromptDict) -> None:
        prompt["positive"]["inputs"]["width"] = 32  # conditioning for another model
        run = bench.run(warming(prompt, positive=["positive", 0], negative=["negative", 0]))
        text = report(bench, run)
        assert states(text) == [("model", "failed"), ("VAE", "warmed")] * len(SIZES)
        assert "Error: " in text
        prompt["positive"]["inputs"]["width"] = 768
        run = bench.run(warming(prompt, positive=["positive", 0], negative=["negative", 0]))
        assert states(report(bench, run)) == [("model", "warmed"), ("VAE", "ready")] * len(SIZES)

    def test_cancel_stops_between_two_shapes_and_the_node_says_so(
        self, bench: Bench, prompt: PromptDict, server: Any
    ) -> None:
        many = ", ".join(f"{8 * side}x256" for side in range(8, 64))

        def two_are_warm() -> bool:
            return bench.counters()["graph_calls"] >= before + 2

        before = bench.counters()["graph_calls"]
        assert "interrupted" in bench.cancel_once(warming(prompt, sizes=many, vae=False), two_are_warm).lower()
        assert bench.counters()["graph_calls"] - before < 50
        assert re.search(r"warm-up stopped: \d+ of 56 are done", server.log())
        assert_nothing_new(
            bench, {**sized(prompt, 504, 256), "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0])}
        )

    def test_inputs_that_are_not_compiled_are_refused(self, bench: Bench, tiny_prompt: Any) -> None:
        prompt = tiny_prompt()
        with pytest.raises(PromptError, match="The model is not compiled: put Compile Model before Warm Up"):
            bench.run(warming(prompt, vae=False))
        alone = {"warm": node("ResoluteWarmUp", sizes="64x64", batch_sizes="1", prompt_chunks="1", cfg=1.0)}
        with pytest.raises(PromptError, match="Connect the output of Compile Model or Compile VAE Decode"):
            bench.run(alone)
        alone["net"] = node("ResoluteTestControlNet", kind="sd", seed=21)
        alone["compiled-net"] = node("ResoluteCompileControlNet", control_net=["net", 0], backend="inductor")
        alone["warm"]["inputs"]["control_net"] = ["compiled-net", 0]
        with pytest.raises(PromptError, match="A ControlNet is warmed up together with a model"):
            bench.run(alone)

    def test_a_connected_vae_that_is_not_compiled_is_reported(self, bench: Bench, prompt: PromptDict) -> None:
        prompt = {**prompt, "plain": node("ResoluteTestTinyVAE", seed=9)}
        asked = warming(prompt, sizes="64x64", vae=False)
        asked["warm"]["inputs"]["vae"] = ["plain", 0]
        text = report(bench, bench.run(asked))
        assert "The VAE is not compiled: put Compile VAE Decode before Warm Up." in text

    def test_a_tile_size_that_no_decoder_accepts_is_refused(self, bench: Bench, prompt: PromptDict) -> None:
        with pytest.raises(PromptError, match=r"tile_size 8 is smaller than VAE Decode .* use 64 or more, or 0"):
            bench.run(warming(prompt, sizes="64x64", tile_size=8))
