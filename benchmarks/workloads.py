"""The workloads of benchmarks: models, contenders, queues of prompts, and the nodes of each prompt.

A model is SDXL or a transformer of `family_models` (flux, or flux:fp8-scaled in a format). Contenders differ only in
their nodes: compile nodes, and nodes between a model and its samplers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.models import generated
from scripts.server.process import link
from scripts.setup import command

from . import family_models, rig
from .family_models import Family, family
from .rig import OURS, STOCK, Size, node
from .weight_formats import file_of

CHECKPOINTS = ("sdxl",)
BATCH, LONG, LORA = "batch 2", "154 tokens", "LoRA"
_SDXL = (
    (5, 1024, 1024, ""), (2, 960, 720, ""), (3, 1024, 1024, ""), (2, 1280, 1280, ""), (2, 512, 2048, ""),
    (2, 1024, 1024, BATCH), (2, 1024, 1024, LONG), (2, 1024, 1024, LORA), (2, 1024, 1024, ""), (2, 960, 720, ""),
)  # fmt: skip


class Prompt(NamedTuple):
    """A prompt of a queue. width, height: pixels. more: BATCH, LONG, LORA or empty."""

    model: str
    width: int
    height: int
    more: str = ""

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height}" + (f", {self.more}" if self.more else "")


@dataclass(frozen=True)
class Contender:
    """backend: of Resolute's nodes; empty without them. others: inputs of nodes after the model, by class."""

    backend: str = ""
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


CONTENDERS = {
    OURS: Contender("inductor"),
    "cudagraph": Contender("cudagraph"),
    "oneflow": Contender("oneflow"),
    "deepcache-3": Contender("inductor", {"ResoluteDeepCache": {"interval": 3, "depth": 2}}),
    STOCK: Contender(),
    "core": Contender(others={"TorchCompileModel": {"backend": "inductor"}}),
    "reference": Contender(others={"ResoluteTestReferenceModel": {}}),  # computes in float32
}


def make(setup: command.Setup, models: Path, names: list[str], is_small: bool) -> dict[str, str]:
    """Make the files of these models in a folder. Returns the file name of each checkpoint."""
    family_models.ensure(setup, models, [name for name in names if name not in CHECKPOINTS], is_small)
    checkpoints = {}
    for name in names:
        if name in CHECKPOINTS:
            made = generated.ensure("sd15-mini" if is_small else name, setup.python, setup.comfyui)
            link(made, models / "checkpoints" / made.name)
            checkpoints[name] = made.name
    return checkpoints


def as_contender(nodes: dict[str, Any], contender: str) -> dict[str, Any]:
    """A stock prompt with a contender's nodes added."""
    chosen = CONTENDERS[contender]
    if chosen.backend:
        nodes = rig.compiled(nodes, chosen.backend)
    for kind, inputs in chosen.others.items():
        nodes = rig.with_model_node(nodes, f"{contender}-", kind, **inputs)
    return nodes


def transformer(name: str, made: Family, size: Size, steps: int, seed: int, form: str = "") -> dict[str, Any]:
    """A prompt that samples with a transformer of `family_models`. form: the format of its weights."""
    frames = {"length": made.frames} if made.frames > 1 else {}
    batch = {} if made.sound else {"batch_size": size[2]}  # core's node for video with sound makes one
    text = {"tokens": made.tokens, "width": made.width, "pooled_width": made.pooled, "batch": 1}
    text |= {"padding": made.padding} if made.padding else {}
    nodes: dict[str, Any] = {
        "load": node("UNETLoader", unet_name=file_of(name, form), weight_dtype="default"),
        "latent": node(made.latent, width=size[0], height=size[1], **batch, **frames),
        "positive": node("ResoluteTestConditioning", seed=1, **text),
        "negative": node("ResoluteTestConditioning", seed=2, **text),
    }
    return rig.sampled(nodes, ["load", 0], seed, steps, 1.0, "simple")


def queue(models: tuple[str, ...], is_small: bool) -> list[Prompt]:
    """The prompts of a queue; of several models, eight of each in turn. is_small: small sizes."""
    if len(models) > 1:
        return [queue((model,), is_small)[0] for model in models] * 8
    (model,) = models
    if model in CHECKPOINTS:
        small = 8 if is_small else 1
        kinds = [(count, Prompt(model, w // small // 8 * 8, h // small // 8 * 8, more)) for count, w, h, more in _SDXL]
    else:
        one, other = (Prompt(model, *size) for size in family(model.partition(":")[0], is_small).sizes[:2])
        kinds = [(5, one), (3, other), (3, one), (3, other)]
    return [prompt for count, prompt in kinds for _ in range(count)]


def nodes_of(prompt: Prompt, contender: str, seed: int, files: Mapping[str, str], is_small: bool) -> dict[str, Any]:
    """A contender's nodes for a prompt of a queue. files: the names of checkpoints and of the LoRA."""
    text, batch = "a lighthouse " * (60 if prompt.more == LONG else 1), 2 if prompt.more == BATCH else 1
    size = (prompt.width, prompt.height, batch, text)
    if prompt.model in CHECKPOINTS:
        nodes = rig.prompt(files[prompt.model], size, 3 if is_small else rig.STEPS, seed)
    else:
        name, _, form = prompt.model.partition(":")
        nodes = transformer(name, family(name, is_small), size, 3 if is_small else 10, seed, form)
    if prompt.more == LORA:
        nodes = rig.with_lora(nodes, files["lora"])
    return as_contender(nodes, contender)
