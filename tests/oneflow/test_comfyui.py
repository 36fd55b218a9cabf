"""A headless ComfyUI samples and decodes through OneFlow: the same images, and each graph is built once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from scripts.demonstration.plan import Job, prompt_for
from scripts.server.process import ComfyServer

from ..comfy.matrix.controlling import all_compiled, controlled
from ..comfy.rig import Bench, PromptDict, Run, assert_different, assert_same, compiled, node
from ..comfy.test_workflows import saved

Prompt = Callable[..., PromptDict]

STEPS = 2
WORKFLOW = "oneflow_text_to_image"
# Width, height, batch. OneDiff reports had `Check failed: (45 == 46)` at 960x720. The first size has about a quarter
# of its sides: 184 pixels are 23, 12 and 6 at the UNet's three levels. test_lowering runs the full size.
SIZES = [(240, 184, 1), (152, 136, 2)]
TARGETS = {
    "diffusion_model.time_embed.0": (128, 32),
    "diffusion_model.input_blocks.1.0.in_layers.2": (32, 32, 3, 3),
    "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q": (32, 32),
}


def both(bench: Bench, built: PromptDict, compile_all: Callable[..., PromptDict] = compiled) -> tuple[Run, Run]:
    """Run a prompt without Resolute and through OneFlow; assert equal images and no bypass."""
    plain = bench.run(built)
    ours = bench.run(compile_all(built, "oneflow"))
    assert_same(ours, plain)
    assert ours.bypasses == {}, events(bench)
    return plain, ours


def events(bench: Bench) -> list[str]:
    return [event["text"] for event in bench.client.get("/resolute/events")["events"] if event["kind"] == "bypass"]


class TestTheBundledWorkflow:
    @pytest.fixture
    def run(self, bench: Bench, seeds: Iterator[int]) -> Callable[..., Run]:
        """Run the workflow at one size, as it is and with the backend `eager`; assert equal images and no bypass."""

        def run(width: int, height: int, batch: int) -> Run:
            job, seed = Job(WORKFLOW, ((width, height),), batch, tokens=8), next(seeds)
            # The first None is the demo's small model; a backend of None keeps the one in the file.
            plain, ours = (bench.run(saved(prompt_for(job, None, name, seed, STEPS))) for name in ("eager", None))
            assert_same(ours, plain)
            assert len(ours.images) == batch
            assert ours.bypasses == {}, events(bench)
            return ours

        return run

    @pytest.mark.parametrize(("width", "height", "batch"), SIZES)
    def test_is_right_and_builds_one_graph_for_the_unet_and_one_for_the_decoder(
        self, run: Callable[..., Run], width: int, height: int, batch: int
    ) -> None:
        rise = run(width, height, batch).rise
        assert (rise["captures"], rise["replays"]) == (2, STEPS - 1)

    @pytest.mark.parametrize(("width", "height", "batch"), SIZES[::-1])
    def test_builds_nothing_when_sizes_repeat_in_another_order(
        self, run: Callable[..., Run], width: int, height: int, batch: int
    ) -> None:
        rise = run(width, height, batch).rise
        assert (rise["captures"], rise["graph_calls"], rise["eager_calls"]) == (0, 0, 0)
        assert rise["replays"] == STEPS + 1, "the steps, and one decode"

    def test_shows_its_graphs_and_their_memory_in_the_report(self, bench: Bench) -> None:
        report = bench.client.get("/resolute/cache")
        shapes = {(entry["role"], *entry["latent_shape"]) for entry in report["entries"]}
        assert {("vae_decode", 1, 4, 23, 30), ("unet", 2, 4, 23, 30), ("unet", 4, 4, 17, 19)} <= shapes
        assert all(entry["bytes"] > 0 and entry["backend"] == "oneflow" for entry in report["entries"])
        assert report["bytes"] <= report["budget_bytes"]


class TestLora:
    @pytest.fixture(autouse=True)
    def _files(self, comfy_server: ComfyServer) -> None:
        folder = comfy_server.folder / "models" / "loras"
        folder.mkdir(parents=True, exist_ok=True)
        noise = numpy.random.default_rng(0)
        tensors = {}
        for name, shape in TARGETS.items():
            fan_in = float(numpy.prod(shape[1:]))
            down = noise.standard_normal((2, *shape[1:]))
            up = noise.standard_normal((shape[0], 2, *[1] * (len(shape) - 2)))
            tensors[f"{name}.lora_down.weight"] = (down / fan_in**0.5).astype(numpy.float32)
            tensors[f"{name}.lora_up.weight"] = (up * 0.5).astype(numpy.float32)
        save_file(tensors, folder / "oneflow.safetensors")

    def test_every_strength_takes_effect_and_only_the_first_rebuilds_graphs(self, bench: Bench, prompt: Prompt) -> None:
        built = prompt()
        plain, _ = both(bench, built)
        captures = []
        for strength in (0.8, -1.3, 0.4):
            lora = node(
                "LoraLoaderModelOnly", model=["model", 0], lora_name="oneflow.safetensors", strength_model=strength
            )
            changed = {**built, "lora": lora, "sample": {**built["sample"], "inputs": {**built["sample"]["inputs"]}}}
            changed["sample"]["inputs"]["model"] = ["lora", 0]
            _, run = both(bench, changed)
            assert_different(run, plain)
            captures.append(run.rise["captures"])
        assert captures == [1, 0, 0]

    def test_without_it_the_picture_is_the_first_one_again(self, bench: Bench, prompt: Prompt) -> None:
        _, run = both(bench, prompt())
        assert run.rise["captures"] == 0


@pytest.mark.long
class TestControlNet:
    def test_it_runs_as_its_own_graph_next_to_the_unets(self, bench: Bench, prompt: Prompt) -> None:
        built = prompt()
        plain, run = both(bench, controlled(built, "net"), all_compiled)
        assert run.rise["captures"] == 2, "the ControlNet's, and the UNet's with its residuals"
        weaker, run = both(bench, controlled({**built}, "net", strength=0.4), all_compiled)
        assert run.rise["captures"] == 0
        assert_different(plain, weaker)
        assert_different(weaker, bench.run(built))


@pytest.mark.long
class TestDeepCache:
    def test_its_full_and_fast_passes_are_two_graphs_and_the_picture_is_the_same(
        self, bench: Bench, prompt: Prompt
    ) -> None:
        whole = prompt(steps=10)
        built = {**whole, "sample": {**whole["sample"], "inputs": {**whole["sample"]["inputs"], "model": ["cache", 0]}}}
        built["cache"] = node("ResoluteDeepCache", model=["model", 0], interval=3, depth=2)
        plain, run = both(bench, built)
        assert run.rise["captures"] == 2
        assert run.rise["replays"] == 10 - 2
        roles = {entry["role"] for entry in bench.client.get("/resolute/cache")["entries"]}
        assert {"deepcache_full", "deepcache_fast"} <= roles
        assert_different(plain, bench.run(whole))


def test_free_graphs_keeps_graphs_that_would_return_no_memory(bench: Bench, prompt: Prompt) -> None:
    built = prompt()
    built["free"] = node("ResoluteFree", any=["sample", 0])
    built["samples"]["inputs"]["samples"] = ["free", 0]
    both(bench, built)
    _, run = both(bench, prompt())
    assert (run.rise["captures"], run.rise["replays"]) == (0, STEPS)


@pytest.fixture(scope="module", autouse=True)
def _nothing_died(comfy_server: ComfyServer) -> Iterator[Any]:
    """OneFlow may end the process instead of raising, so check at the end that the server is still running."""
    yield
    assert comfy_server.client.get("/system_stats")["system"]["python_version"].startswith("3.10")
