"""The bundled workflows with DeepCache in them run, on models of their kinds that are small."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.places import ROOT

from ..rig import PromptDict, assert_different, node
from .kit import LATENT_TOLERANCE, Check, assert_equal_latents

STEPS = 10
BACKENDS = ("inductor", "eager")
# What takes the place of a loader, and of what only its model understands: of SD1.5, or of SDXL.
WIDTHS = {"sd": {"width": 768, "pooled_width": 0}, "sdxl": {"width": 2048, "pooled_width": 1280}}

pytestmark = pytest.mark.usefixtures("example_picture")


def small(workflow: str, backend: str, seed: int, kind: str = "sd", **sampling: Any) -> PromptDict:
    """The API form with tiny models in the place of files, sizes an eighth as large, and its latents saved.

    Loaders have several outputs: a tiny model and a tiny VAE follow the links.
    """
    prompt: PromptDict = json.loads((ROOT / "workflows" / "api" / f"{workflow}.json").read_text("utf-8"))
    stand_ins: dict[tuple[str, int], list[Any]] = {}
    for name, part in list(prompt.items()):
        inputs, kind_of_node = part["inputs"], part["class_type"]
        if "backend" in inputs:
            inputs["backend"] = backend
        if kind_of_node == "CheckpointLoaderSimple":
            prompt[name] = node("ResoluteTestTinyModel", seed=0, kind=kind)
            prompt[f"{name}-vae"] = node("ResoluteTestTinyVAE", seed=0)
            stand_ins[name, 2] = [f"{name}-vae", 0]
        elif kind_of_node == "LoraLoaderModelOnly":
            stand_ins[name, 0] = inputs["model"]
            del prompt[name]
        elif kind_of_node == "ControlNetLoader":
            prompt[name] = node("ResoluteTestControlNet", kind=kind, seed=21)
        elif kind_of_node == "CLIPTextEncode":
            prompt[name] = node("ResoluteTestConditioning", seed=int(name), tokens=77, batch=1, **WIDTHS[kind])
        elif kind_of_node == "ResoluteResolution":
            inputs.update(preset="custom", width=inputs["width"] // 4 + 8, height=inputs["height"] // 4)
        elif kind_of_node == "KSampler":
            inputs.update(seed=seed, **sampling)
            prompt[f"{name}-latent"] = node("ResoluteTestSaveLatent", samples=[name, 0], filename_prefix="workflow")
    for part in prompt.values():
        for key, value in part["inputs"].items():
            if isinstance(value, list):
                part["inputs"][key] = stand_ins.get((value[0], value[1]), value)
    return prompt


@pytest.mark.parametrize("workflow", ["deepcache", "deepcache_controlnet"])
def test_a_workflow_skips_steps_and_is_the_same_compiled_and_not(check: Check, seed: int, workflow: str) -> None:
    compiled, eager = (check.run(small(workflow, backend, seed, steps=STEPS)) for backend in BACKENDS)
    assert compiled[1] == eager[1] == [(4, 6)]
    assert_equal_latents(compiled[0], eager[0], LATENT_TOLERANCE)
    assert compiled[0].bypasses == {}
    assert len(compiled[0].images) == 1
    again, _ = check.run(small(workflow, "inductor", seed + 10_000, steps=STEPS))
    assert (again.rise["region_compiles"], again.rise["eager_calls"]) == (0, 0)
    assert again.forwards >= STEPS
    whole = small(workflow, "inductor", seed, steps=STEPS)
    for part in whole.values():
        if part["class_type"] == "ResoluteDeepCache":
            part["inputs"]["interval"] = 1
    assert_different(check.bench.run(whole), compiled[0])


@pytest.mark.long
def test_lcm_in_three_shapes_is_the_models_own_picture_and_deepcache_says_why(check: Check, seed: int) -> None:
    def workflow(backend: str, its_seed: int) -> PromptDict:
        return small("lcm_image_to_image", backend, its_seed, kind="sdxl")

    check.bench.run(workflow("inductor", seed))  # the prompt that may compile
    before = len(check.server.log())
    run = check.bench.run(workflow("inductor", seed + 10_000))
    reason = "DeepCache: 6 steps, all full: 8 steps or fewer leave nothing to skip"
    assert check.server.log()[before:].count(reason) == 3
    assert (run.rise["region_compiles"], run.rise["eager_calls"], run.bypasses) == (0, 0, {})
    assert run.forwards == 3 * (6 + 1)  # six steps and a decode each
    assert sorted(image.shape[:2] for image in run.images) == [(128, 520), (256, 264), (512, 136)]
    without = workflow("eager", seed + 10_000)
    (name,) = [name for name, part in without.items() if part["class_type"] == "ResoluteDeepCache"]
    for part in without.values():
        if part["inputs"].get("model") == [name, 0]:
            part["inputs"]["model"] = without[name]["inputs"]["model"]
    del without[name]
    assert_equal_latents(run, check.bench.run(without), LATENT_TOLERANCE)
