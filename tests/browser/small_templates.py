"""Prompts of ComfyUI's own templates with small models in the place of theirs, so that a CPU without them runs them.

Random embeddings stand in for the text encoders. The VAEs are large too, so the latents are saved.
"""

from __future__ import annotations

import copy
from typing import Any

from scripts.workflows import SDXL

from ..comfy.rig import node

Prompt = dict[str, Any]
# The small model of each template; that of SDXL is a file.
KINDS = {
    "flux_dev_full_text_to_image": "flux",
    "image_z_image_turbo": "z-image-int8",
    "text_to_video_wan": "wan2.1",
    "image_qwen_image_edit_2509": "qwen-image",
}
TEXT = 32  # the width of the embeddings
SIZE = {"width": 64, "height": 64, "batch_size": 1}
LATENTS = {"EmptySD3LatentImage", "EmptyLatentImage", "VAEEncode"}
SAMPLERS = {"KSampler", "KSamplerAdvanced"}
STEPS = 2


def small(template: str, prompt: Prompt) -> Prompt:
    """The nodes that feed the samplers of a prompt, with a small model and size, two steps, and nothing to compile."""
    made = {name: _small(template, number, part) for number, (name, part) in enumerate(prompt.items())}
    samplers = [name for name, part in made.items() if part["class_type"] in SAMPLERS]
    save = {name: node("ResoluteTestSaveLatent", samples=[name, 0], filename_prefix="core") for name in samplers}
    needed, left = set[str](), list(samplers)
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += [each[0] for each in made[name]["inputs"].values() if isinstance(each, list) and each[0] in made]
    return {name: made[name] for name in made if name in needed} | {
        f"saved-{name}": part for name, part in save.items()
    }


def _small(template: str, number: int, given: dict[str, Any]) -> dict[str, Any]:
    part = copy.deepcopy(given)
    kind, inputs = part["class_type"], part["inputs"]
    if kind == "CheckpointLoaderSimple":
        inputs["ckpt_name"] = SDXL
    elif kind == "UNETLoader":
        return node("ResoluteTestTransformer", seed=1, kind=KINDS[template])
    elif kind == "LoraLoaderModelOnly":
        return node("ModelSamplingAuraFlow", model=inputs["model"], shift=1.73)  # any node that passes a model on
    elif kind in LATENTS and "vae" in inputs:
        return node("EmptySD3LatentImage", **SIZE)
    elif kind in LATENTS:
        inputs.update(SIZE)
    elif kind == "EmptyHunyuanLatentVideo":
        inputs.update(SIZE, length=5)
    elif ("clip" in inputs and template in KINDS) or kind == "ConditioningZeroOut":
        return node("ResoluteTestConditioning", seed=number, tokens=16, width=TEXT, pooled_width=TEXT, batch=1)
    elif kind in SAMPLERS:
        inputs["steps"] = STEPS
        if kind == "KSamplerAdvanced":  # the two of SDXL's template share the steps
            inputs["end_at_step"] = min(inputs["end_at_step"], STEPS)
            inputs["start_at_step"] = min(inputs["start_at_step"], STEPS - 1)
    if kind.startswith("Resolute"):
        inputs["backend"] = "eager"
    return part
