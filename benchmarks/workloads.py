"""The workloads of benchmarks: models, contenders, and the prompt of each.

A model is SDXL or a transformer of `family_models` (flux, or flux:fp8-scaled in a format). Contenders differ only in
their nodes: compile nodes, and nodes between a model and its samplers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.models import generated
from scripts.server.process import link
from scripts.setup import command

from . import family_models, rig
from .family_models import Family
from .rig import OURS, STOCK, Size, node
from .weight_formats import file_of

CHECKPOINTS = ("sdxl",)


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
