"""What the demo runs: which bundled workflow, at which sizes, batches and prompt lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .build_workflows import FOLDER, POSITIVE, TOUR

PromptDict = dict[str, dict[str, Any]]
Size = tuple[int, int]  # width, height in pixels

SD15, SDXL = "sd15_text_to_image", "sdxl_text_to_image"
TOUR_NAME, IMAGE_TO_IMAGE, COMPARE = "resolution_tour", "image_to_image", "compare_with_stock"
TEXT_TO_IMAGE = {"sd15": SD15, "sdxl": SDXL}
# CLIP takes 75 words of its own per chunk of 77 tokens; this text fills one and part of the next.
LONG_TEXT = ", ".join([POSITIVE] * 6)
SEED = 1

_Case = tuple[Size, int, int]  # size, batch, tokens
# Odd latents: 264x200 is 33x25; 240x360 is 30x45, whose next level is 15x23: as 720x960 meets
# it further down, where half of 45 rounded up, doubled, is no longer 45.
_CPU_QUICK: tuple[_Case, ...] = (
    ((128, 128), 1, 77),
    ((264, 200), 1, 77),
    ((120, 160), 1, 77),
    ((192, 128), 3, 77),
    ((136, 104), 2, 154),
)
_CPU: tuple[_Case, ...] = (
    ((128, 128), 1, 77),
    ((192, 128), 1, 77),
    ((264, 200), 1, 77),
    ((240, 320), 1, 77),
    ((240, 360), 1, 77),
    ((128, 128), 2, 77),
    ((192, 128), 3, 77),
    ((192, 128), 1, 154),
    ((264, 200), 2, 154),
)
_CUDA_QUICK: tuple[_Case, ...] = (
    ((1024, 1024), 1, 77),
    ((960, 720), 1, 77),
    ((720, 720), 3, 77),
    ((896, 768), 2, 154),
)
_CUDA: tuple[_Case, ...] = (
    ((1024, 1024), 1, 77),
    ((960, 720), 1, 77),
    ((720, 720), 1, 77),
    ((896, 768), 1, 77),
    ((1280, 1280), 1, 77),
    ((512, 2048), 1, 77),
    ((1064, 808), 1, 77),
    ((1024, 1024), 2, 77),
    ((720, 720), 3, 77),
    ((1024, 1024), 1, 154),
    ((960, 720), 2, 154),
)
_CASES = {("cpu", False): _CPU, ("cpu", True): _CPU_QUICK, ("cuda", False): _CUDA, ("cuda", True): _CUDA_QUICK}
# The tour's own sizes are for a GPU; these have its proportions, odd latents included.
_CPU_TOUR: tuple[Size, ...] = ((120, 96), (112, 96), (96, 96), (80, 120), (88, 72))
_PICTURE_SIZE: dict[str, Size] = {"cpu": (136, 104), "cuda": (720, 720)}


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the table: a workflow with its sizes (the tour has five), batch and prompt length."""

    workflow: str
    sizes: tuple[Size, ...]
    batch: int = 1
    tokens: int = 77

    @property
    def size_text(self) -> str:
        """For people: ``264x200``, or how many sizes there are in this one prompt."""
        return text_of(self.sizes[0]) if len(self.sizes) == 1 else f"{len(self.sizes)} sizes"

    @property
    def name(self) -> str:
        """Unique in a plan, and fit for a file name."""
        size = "_".join(self.size_text.split())
        return f"{self.workflow}_{size}_batch{self.batch}_tokens{self.tokens}"

    def __str__(self) -> str:
        return f"{self.workflow}, {self.size_text}, batch {self.batch}, {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Plan:
    """The jobs in order, and the bundled workflows that are left out, each with the reason."""

    jobs: tuple[Job, ...]
    left_out: dict[str, str]


def make_plan(device: str, family: str, quick: bool) -> Plan:
    """The plan for ``cpu`` or ``cuda`` and a checkpoint of the family ``sd15`` or ``sdxl``."""
    cases = _CASES[device, quick]
    jobs = [Job(TEXT_TO_IMAGE[family], (size,), batch, tokens) for size, batch, tokens in cases]
    left_out = {TEXT_TO_IMAGE[other]: _other_family(other) for other in TEXT_TO_IMAGE if other != family}
    if quick:
        left_out |= dict.fromkeys((IMAGE_TO_IMAGE, COMPARE, TOUR_NAME), "--quick leaves it out")
    else:
        jobs += [Job(workflow, (_PICTURE_SIZE[device],)) for workflow in (IMAGE_TO_IMAGE, COMPARE)]
        tour = _CPU_TOUR if device == "cpu" else tuple((width, height) for _, _, width, height in TOUR)
        jobs.append(Job(TOUR_NAME, tour))
    return Plan(tuple(jobs), left_out)


def prompt_for(job: Job, checkpoint: str, backend: str | None, seed: int, steps: int) -> PromptDict:
    """The bundled API prompt of a job with its values put in; a backend of None leaves the file's own."""
    prompt: PromptDict = json.loads((FOLDER / "api" / f"{job.workflow}.json").read_text("utf-8"))
    sizes = iter(job.sizes)
    for node in prompt.values():
        inputs, kind = node["inputs"], node["class_type"]
        if "ckpt_name" in inputs:
            inputs["ckpt_name"] = checkpoint
        if backend is not None and "backend" in inputs:
            inputs["backend"] = backend
        if kind == "KSampler":
            inputs.update(seed=seed, steps=steps)
        elif kind == "ResoluteResolution":
            width, height = next(sizes)
            inputs.update(preset="custom", width=width, height=height)
        elif kind == "EmptyLatentImage":
            inputs["batch_size"] = job.batch
        elif job.tokens > 77 and inputs.get("text") == POSITIVE:
            inputs["text"] = LONG_TEXT
    return prompt


def text_of(size: Size) -> str:
    """``(264, 200)`` -> ``264x200``."""
    return f"{size[0]}x{size[1]}"


def _other_family(family: str) -> str:
    if family == "sdxl":
        return "the checkpoint is no SDXL; give one with --checkpoint FILE, or --model sdxl (random weights, 6.9 GB)"
    return "the checkpoint is an SDXL; give an SD1.5 one with --checkpoint FILE, or none"
