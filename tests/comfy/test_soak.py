"""A short soak: many prompts of random sizes, batches and LoRAs on two models. benchmarks/soak.py is the long one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from scripts.server.process import ComfyServer

pytest.register_assert_rewrite(f"{__package__}.rig")
from .fuzz import loras  # noqa: E402 (after register_assert_rewrite)
from .random_visits import Visit, trace  # noqa: E402
from .rig import (  # noqa: E402
    LATENT_TOLERANCE,
    Bench,
    PromptDict,
    Run,
    compile_model,
    compiled,
    node,
    with_model,
    with_vae,
)

PROMPTS = 60
EVERY = 20
KINDS = ["sd", "sdxl"]
MOST_BYTES = 2 << 20  # a tiny model has 10 MiB, the outputs of one prompt that ComfyUI keeps have less than one

Make = Callable[..., PromptDict]


@pytest.mark.long
def test_many_prompts_leave_nothing_behind_and_only_the_first_of_each_model_compiles(
    server: ComfyServer, bench: Bench, tiny_prompt: Make, seeds: Iterator[int]
) -> None:
    loras.write(server.folder / "models" / "loras")
    before = held(bench, tiny_prompt, seeds)
    compiles = []
    for number, visit in enumerate(trace(PROMPTS, KINDS, range(64, 257, 8))):
        run = bench.run(graph(tiny_prompt, visit, is_compiled=True))
        if run.rise["region_compiles"]:
            compiles.append((visit, bench.texts("compile")[-3:]))
        if number % EVERY == EVERY - 1:
            assert_equal(run, bench.run(graph(tiny_prompt, visit, is_compiled=False)))
    assert compiles == []
    after = held(bench, tiny_prompt, seeds)
    assert after["modules"] <= before["modules"]
    assert after["bytes"] - before["bytes"] < MOST_BYTES


def held(bench: Bench, tiny_prompt: Make, seeds: Iterator[int]) -> dict[str, int]:
    """What the server holds after ComfyUI's Free and one prompt of each model."""
    bench.client.post("/free", {"unload_models": True, "free_memory": True})
    for kind in KINDS:  # ComfyUI frees between two prompts, at the latest after the first
        for _ in range(2):
            bench.run(compiled(tiny_prompt(kind=kind, seed=next(seeds), steps=1)))
    run = bench.run({"held": node("ResoluteTestHeld", seed=next(seeds))})
    found: dict[str, int] = json.loads(run.history["outputs"]["held"]["text"][0])
    return found


def graph(tiny_prompt: Make, visit: Visit, *, is_compiled: bool) -> PromptDict:
    size = {"width": visit.width, "height": visit.height, "batch": visit.batch}
    prompt = tiny_prompt(kind=visit.kind, seed=visit.seed, steps=1, **size)
    lora = node("LoraLoaderModelOnly", lora_name=f"fuzz-{visit.lora}.safetensors", strength_model=visit.strength)
    nodes = [lora] * bool(visit.lora) + [compile_model()] * is_compiled
    changed = with_model(prompt, *nodes)
    return with_vae(changed) if is_compiled else changed


def assert_equal(ours: Run, stock: Run) -> None:
    for actual, expected in itertools.zip_longest(ours.latents, stock.latents):
        error: Any = numpy.linalg.norm(actual - expected)
        assert error <= LATENT_TOLERANCE * numpy.linalg.norm(expected)
