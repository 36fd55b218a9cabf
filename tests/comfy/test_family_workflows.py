"""The workflows with transformers on a real server: compiled equals eager, and only the first prompt compiles.

Small models take the place of theirs, and random embeddings that of the text encoders. Their VAEs are large too, so the
latents are compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.workflows import api, transformers, ui

from .rig import LATENT_TOLERANCE, Bench, PromptDict, assert_ran_compiled, assert_same, assert_through_regions, node

STEPS = 2
TEXT = 32
# The small model of each.
MODELS = {
    "flux_dev_text_to_image": "flux",
    "qwen_image_text_to_image": "qwen-image",
    "wan22_text_to_video": "wan2.2",
    "z_image_turbo_int8_text_to_image": "z-image-int8",
}
# Rounding in front of a quantizer is amplified: two right results differ by so much.
TOLERANCES = {"z_image_turbo_int8_text_to_image": 3e-2}
SHORT = ("z_image_turbo_int8_text_to_image",)
SIZES = ((64, 96, 7), (128, 64, 19))  # width, height and tokens of the text
OUTPUTS = ("VAEDecode", "SaveImage", "CreateVideo", "SaveVideo", "ResoluteCompileVAEDecode")
TEXTS = ("CLIPTextEncode", "ConditioningZeroOut")
LOADERS = ("CLIPLoader", "DualCLIPLoader")


def small(workflow: str, backend: str, size: tuple[int, int, int], seed: int) -> PromptDict:
    """The workflow's API form with a small model, a small size and few steps."""
    prompt: PromptDict = api(workflow)
    width, height, tokens = size
    sampler = ""
    for name, part in list(prompt.items()):
        kind, inputs = part["class_type"], part["inputs"]
        if kind in (*OUTPUTS, *LOADERS):
            del prompt[name]
        elif kind == "UNETLoader":
            prompt[name] = node("ResoluteTestTransformer", seed=1, kind=MODELS[workflow])
        elif kind == "VAELoader":
            prompt[name] = node("ResoluteTestTinyVAE", seed=1)
        elif kind in TEXTS:
            shape = {"tokens": tokens, "width": TEXT, "pooled_width": TEXT, "batch": 1}
            prompt[name] = node("ResoluteTestConditioning", seed=int(name), **shape)
        elif kind == "ResoluteResolution":
            inputs.update(preset="custom", width=width, height=height)
        elif kind == "ResoluteCompileModel":
            inputs["backend"] = backend
        elif kind == "KSampler":
            inputs.update(steps=STEPS, seed=seed)
            sampler = name
        if "length" in inputs:
            inputs["length"] = 5 if tokens == SIZES[0][2] else 9
    prompt["saved"] = node("ResoluteTestSaveLatent", samples=[sampler, 0], filename_prefix="family")
    return prompt


@pytest.mark.parametrize(
    "workflow",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in MODELS],
)
def test_it_is_right_and_compiles_in_its_first_prompt_only(bench: Bench, seed: int, workflow: str) -> None:
    for number, size in enumerate(SIZES):
        eager = bench.run(small(workflow, "eager", size, seed + number))
        compiled = bench.run(small(workflow, "auto", size, seed + number))
        calls = eager.rise["eager_calls"]
        assert calls >= STEPS
        assert_same(compiled, eager, TOLERANCES.get(workflow, LATENT_TOLERANCE))
        if number == 0:
            assert_through_regions(compiled, calls)
        else:
            assert_ran_compiled(compiled, calls)


@pytest.mark.parametrize("workflow", transformers())
def test_its_models_are_those_of_comfyuis_templates(workflow: str) -> None:
    templates = pytest.importorskip("comfyui_workflow_templates_json", reason="the templates are not installed")
    folder = Path(templates.__path__[0]) / "templates"
    known = "".join(path.read_text("utf-8") for path in folder.glob("*.json"))
    models = [model for part in ui(workflow)["nodes"] for model in part["properties"].get("models", [])]
    assert len(models) >= 2
    for model in models:
        assert model["url"] in known
        assert f'"{model["name"]}"' in known
