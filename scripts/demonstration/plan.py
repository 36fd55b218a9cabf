"""The demo's jobs: which bundled workflow runs at which sizes, batches and prompt lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import workflows

PromptDict = dict[str, dict[str, Any]]
Size = tuple[int, int]  # width, height in pixels

SD15, SDXL = "sd15_text_to_image", "sdxl_text_to_image"
TOUR_NAME, IMAGE_TO_IMAGE, COMPARE = "resolution_tour", "image_to_image", "compare_with_stock"
DEEPCACHE = "deepcache"
_NEEDS_MORE = {
    "deepcache_controlnet": "needs a ControlNet in addition to the model",
    "lcm_image_to_image": "needs a LoRA in addition to the model",
    "oneflow_text_to_image": "needs OneFlow, which is in another environment",
    SDXL: "the model is not SDXL",
}
# The texts of the bundled workflows.
POSITIVE = "a lighthouse on a cliff at dusk, waves, warm light in the windows, detailed painting"
NEGATIVE = "blurry, low quality, text, watermark"
# A chunk of 77 tokens holds 75 tokens of text; this text fills one chunk and part of the next.
LONG_TEXT = ", ".join([POSITIVE] * 6)
SEED = 1

_Case = tuple[Size, int, int]  # size, batch, tokens
QUICK = 5  # cases of --quick
# Sizes that the model was trained at, with odd latents: 264x200 is 33x25; 240x360 is 30x45, whose next level is 15x23.
# Half of 45 rounded up and doubled is 46, not 45. Its prompts have 4 tokens per object and 4 for the background.
_CASES: tuple[_Case, ...] = (
    ((256, 256), 1, 8), ((264, 200), 1, 8), ((240, 360), 1, 12), ((192, 128), 3, 8), ((320, 240), 2, 12),
    ((384, 384), 1, 12), ((512, 384), 1, 8), ((512, 512), 1, 12), ((264, 200), 2, 12),
)  # fmt: skip
# The tour's own sizes are for a GPU; these have the same proportions, including odd latents.
_TOUR: tuple[Size, ...] = ((256, 192), (224, 192), (192, 192), (160, 240), (184, 136))
_PICTURE: _Case = ((264, 200), 1, 12)
_CAPTIONS = {
    8: (
        "large red circle left, white background",
        "small blue square right, grey background",
        "large green triangle top, black background",
        "large purple ring centre, white background",
    ),
    12: (
        "large yellow diamond top, small red cross bottom, grey background",
        "large blue circle left, small orange square right, white background",
        "small green triangle left, large purple ring right, black background",
    ),
}
# The guidance at which the bundled model draws well; the workflows have SD1.5's.
_BUNDLED_CFG = 4.0


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the table: a workflow with its sizes (the tour has five), batch and prompt length."""

    workflow: str
    sizes: tuple[Size, ...]
    batch: int = 1
    tokens: int = 77

    @property
    def size_text(self) -> str:
        """``264x200``, or the number of sizes if the prompt has several."""
        return "{}x{}".format(*self.sizes[0]) if len(self.sizes) == 1 else f"{len(self.sizes)} sizes"

    @property
    def name(self) -> str:
        """Unique in a plan and valid as a file name."""
        size = "_".join(self.size_text.split())
        return f"{self.workflow}_{size}_batch{self.batch}_tokens{self.tokens}"

    def __str__(self) -> str:
        return f"{self.workflow}, {self.size_text}, batch {self.batch}, {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Plan:
    """The jobs in order, and the bundled workflows left out, each with its reason."""

    jobs: tuple[Job, ...]
    left_out: dict[str, str]


def make_plan(quick: bool) -> Plan:
    """The plan for the bundled model, a small UNet like SD1.5's."""
    jobs = [Job(SD15, (size,), batch, tokens) for size, batch, tokens in _CASES[: QUICK if quick else None]]
    left_out = _NEEDS_MORE | dict.fromkeys(workflows.transformers(), "needs a large transformer")
    if quick:
        left_out |= dict.fromkeys((IMAGE_TO_IMAGE, COMPARE, DEEPCACHE, TOUR_NAME), "--quick leaves it out")
    else:
        size, batch, tokens = _PICTURE
        jobs += [Job(workflow, (size,), batch, tokens) for workflow in (IMAGE_TO_IMAGE, COMPARE, DEEPCACHE)]
        jobs.append(Job(TOUR_NAME, _TOUR, batch, tokens))
    return Plan(tuple(jobs), left_out)


def prompt_for(job: Job, checkpoint: str | None, backend: str | None, seed: int, steps: int) -> PromptDict:
    """The bundled API prompt of a job with its values filled in.

    checkpoint: None uses the bundled model, which has its own loader node. backend: None keeps the file's.
    """
    prompt: PromptDict = workflows.api(job.workflow)
    texts = _bundled_texts(job) if checkpoint is None else {POSITIVE: LONG_TEXT if job.tokens > 77 else POSITIVE}
    sizes = iter(job.sizes)
    for node in prompt.values():
        inputs, kind = node["inputs"], node["class_type"]
        if backend is not None and "backend" in inputs:
            inputs["backend"] = backend
        if kind == "KSampler":
            inputs.update(seed=seed, steps=steps)
        elif kind == "ResoluteResolution":
            width, height = next(sizes)
            inputs.update(preset="custom", width=width, height=height)
        elif kind == "EmptyLatentImage":
            inputs["batch_size"] = job.batch
        elif "text" in inputs:
            inputs["text"] = texts.get(inputs["text"], inputs["text"])
        elif "ckpt_name" in inputs:
            inputs["ckpt_name"] = checkpoint
    if checkpoint is None:
        _load_bundled_model(prompt)
    return prompt


def _bundled_texts(job: Job) -> dict[str, str]:
    """Map each text of the bundled workflows to a caption with the job's number of tokens; the size selects which."""
    captions = _CAPTIONS[job.tokens]
    return {POSITIVE: captions[sum(job.sizes[0]) // 8 % len(captions)], NEGATIVE: ""}


def _load_bundled_model(prompt: PromptDict) -> None:
    """Replace checkpoint loaders by the bundled model's loader; after one that compiles, add the two compile nodes."""
    for name, node in list(prompt.items()):
        if node["class_type"] == "KSampler":
            node["inputs"]["cfg"] = _BUNDLED_CFG
        elif node["class_type"] == "CheckpointLoaderSimple":
            prompt[name] = {"class_type": "ResoluteDemoModel", "inputs": {}}
        elif node["class_type"] == "ResoluteLoadCheckpoint":
            backend = node["inputs"]["backend"]
            model, vae = f"{name}-model", f"{name}-vae"
            for other in prompt.values():
                for key, value in other["inputs"].items():
                    if value in ([name, 0], [name, 2]):
                        other["inputs"][key] = [vae if value[1] else model, 0]
            prompt[name] = {"class_type": "ResoluteDemoModel", "inputs": {}}
            inputs = {"model": [name, 0], "backend": backend, "batching": "auto"}
            prompt[model] = {"class_type": "ResoluteCompileModel", "inputs": inputs}
            inputs = {"vae": [name, 2], "backend": backend}
            prompt[vae] = {"class_type": "ResoluteCompileVAEDecode", "inputs": inputs}
