"""The work that benchmarks give a server: models, contenders, and the prompt of each.

A model is a checkpoint, a transformer of `family_models` (flux, or flux:fp8-scaled in a format), a whole prompt from
sampling to frames, or the demo's trained model. A contender is what is put between a model and its samplers: nothing
else differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.models import generated
from scripts.server.process import link
from scripts.setup import command

from . import family_models, gguf_file, rig
from .family_models import FAMILIES, LARGE, Family, family
from .rig import OURS, STOCK, Size, node
from .weight_formats import FORMATS, file_of

REFERENCE = "reference"
DEEPCACHE_DEPTH = 2
_TEXT = "a lighthouse"
_SMALL: list[Size] = [(128, 128, 1, _TEXT), (96, 128, 2, _TEXT)]  # of checkpoints, on the CPU
CHECKPOINTS: dict[str, list[Size]] = {
    "sdxl": [
        (1024, 1024, 1, _TEXT), (960, 720, 1, _TEXT), (1280, 1280, 1, _TEXT), (1024, 1024, 2, _TEXT),
        (896, 768, 1, _TEXT), (720, 720, 1, _TEXT), (512, 2048, 1, _TEXT), (1024, 1024, 1, f"{_TEXT} " * 60),
        (256, 256, 1, _TEXT),
    ],
    "sd15": [(512, 512, 1, _TEXT), (512, 512, 2, _TEXT), (720, 960, 1, _TEXT), (768, 512, 1, f"{_TEXT} " * 60)],
}  # fmt: skip
CONTROLLED = "sdxl-controlnet"
CHECKPOINTS[CONTROLLED] = CHECKPOINTS["sdxl"][:2]
DEMO = "demo"
DEMO_SIZES: list[Size] = [
    (256, 256, 8, "large red circle left, white background"),
    (256, 256, 8, "small blue square right, grey background"),
    (256, 256, 8, "small yellow triangle top, large purple cross bottom, black background"),
    (256, 256, 8, "large orange cross left, small green ring right, grey background"),
]


class Whole(NamedTuple):
    """models: families that sample one after the other, `steps` each. vae: of `VAES`. frames: 1 for a picture, which
    edits another one.
    """

    models: tuple[str, ...]
    vae: str
    size: tuple[int, int]
    frames: int
    steps: int


WHOLES = {
    "wan22-video": Whole(("wan-high", "wan-low"), "wan", (832, 480), 81, 2),  # steps as with a distillation
    "ltx-video": Whole(("ltx",), "ltx", (768, 512), 121, 8),
    "qwen-image-edit": Whole(("qwen-image",), "qwen", (1024, 1024), 1, 10),
}


@dataclass(frozen=True)
class Contender:
    """backend: of Resolute's nodes; empty without them. others: nodes behind the model, by their kind."""

    backend: str = ""
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _deepcache(interval: int) -> Contender:
    return Contender("inductor", {"ResoluteDeepCache": {"interval": interval, "depth": DEEPCACHE_DEPTH}})


CONTENDERS = {
    OURS: Contender("inductor"),
    "cudagraph": Contender("cudagraph"),
    "oneflow": Contender("oneflow"),
    "deepcache-2": _deepcache(2),
    "deepcache-3": _deepcache(3),
    "deepcache-5": _deepcache(5),
    STOCK: Contender(),
    "core": Contender(others={"TorchCompileModel": {"backend": "inductor"}}),
    REFERENCE: Contender(others={"ResoluteTestReferenceModel": {}}),  # computes in float32
}


def known(cell: str) -> bool:
    """True if there is such a model, in such a format."""
    plain, _, form = cell.partition("@")[0].partition(":")
    if not form:
        return plain in (*CHECKPOINTS, *FAMILIES, *LARGE, *WHOLES, DEMO)
    is_written = form in FORMATS and (not FORMATS[form].gguf or plain in gguf_file.ARCHITECTURES)
    return plain in (*FAMILIES, *LARGE) and is_written


def sizes_of(name: str, is_small: bool) -> list[Size]:
    """Those that a model is measured at, in their order."""
    if name in CHECKPOINTS:
        return _SMALL if is_small else CHECKPOINTS[name]
    if name == DEMO:
        return [(64, 64, 1, text) for *_, text in DEMO_SIZES] if is_small else DEMO_SIZES
    if name in WHOLES and not is_small:
        return [(*WHOLES[name].size, 1, "")]
    transformer = WHOLES[name].models[0] if name in WHOLES else name.partition(":")[0]
    found: list[Size] = [(*size, 1, "") for size in family(transformer, is_small).sizes]
    return found[:1] if name in WHOLES else found


def steps_of(name: str, is_small: bool) -> int:
    """Of a whole prompt."""
    if name in WHOLES:
        return WHOLES[name].steps * len(WHOLES[name].models)
    if is_small:
        return 3
    return rig.STEPS if name in CHECKPOINTS or name == DEMO else 10


def is_transformer(name: str) -> bool:
    """A model of `family_models`, with or without a format."""
    return name.partition(":")[0] in (*FAMILIES, *LARGE)


def files_of(name: str) -> list[str]:
    """The names of the files that `family_models.ensure` makes for a model."""
    if name in WHOLES:
        return [*WHOLES[name].models, f"{WHOLES[name].vae}-vae"]
    return [name] if is_transformer(name) else []


def make(
    setup: command.Setup, models: Path, names: list[str], is_small: bool, packages: Path | None = None
) -> dict[str, str]:
    """Make the files of these models in a folder. Returns the file's name of each checkpoint."""
    family_models.ensure(setup, models, [file for name in names for file in files_of(name)], is_small, packages)
    checkpoints = {}
    for name in names:
        if name in CHECKPOINTS:
            plain = "sd15-mini" if is_small else name.removesuffix("-controlnet")
            made = generated.ensure(plain, setup.python, setup.comfyui)
            link(made, models / "checkpoints" / made.name)
            checkpoints[name] = made.name
        if name == CONTROLLED:
            net = generated.ensure(_control_net(is_small), setup.python, setup.comfyui)
            (models / "controlnet").mkdir(exist_ok=True)
            link(net, models / "controlnet" / net.name)
    return checkpoints


def _control_net(is_small: bool) -> str:
    return "sd15-mini-controlnet" if is_small else CONTROLLED


# --- prompts --------------------------------------------------------------------------------------------------------


def prompt(
    name: str, contender: str, size: Size, steps: int, seed: int, checkpoints: Mapping[str, str], is_small: bool
) -> dict[str, Any]:
    """A prompt that saves its latents. steps: of the whole prompt."""
    if name in CHECKPOINTS:
        nodes = rig.prompt(checkpoints[name], size, steps, seed)
        if name == CONTROLLED:
            nodes = rig.with_control_net(nodes, generated.file_name(_control_net(is_small)), *size[:2])
    elif name in WHOLES:
        nodes = whole(name, size, seed, is_small)
    elif name == DEMO:
        nodes = _demo(size, steps, seed)
    else:
        plain, _, form = name.partition(":")
        nodes = transformer(plain, family(plain, is_small), size, steps, seed, form)
    slow = is_small and name in WHOLES  # a CPU compiles a decoder of videos for minutes
    return as_contender(nodes, contender, "eager" if slow else "")


def as_contender(nodes: dict[str, Any], contender: str, backend: str = "") -> dict[str, Any]:
    """Stock's prompt with a contender's nodes. backend: in place of the contender's own."""
    chosen = CONTENDERS[contender]
    if chosen.backend:
        nodes = rig.compiled(nodes, backend or chosen.backend)
    for kind, inputs in chosen.others.items():
        nodes = rig.with_model_node(nodes, f"{contender}-", kind, **inputs)
    return nodes


def conditioning(made: Family) -> dict[str, Any]:
    """Nodes of random texts."""
    text = {"tokens": made.tokens, "width": made.width, "pooled_width": made.pooled, "batch": 1}
    text |= {"padding": made.padding} if made.padding else {}
    return {
        "positive": node("ResoluteTestConditioning", seed=1, **text),
        "negative": node("ResoluteTestConditioning", seed=2, **text),
    }


def transformer(name: str, made: Family, size: Size, steps: int, seed: int, form: str = "") -> dict[str, Any]:
    """Sample with a transformer of `family_models`. form: of its weights."""
    frames = {"length": made.frames} if made.frames > 1 else {}
    batch = {} if made.sound else {"batch_size": size[2]}  # core's node of a video with sound makes one
    file = file_of(name, form)
    if form and FORMATS[form].gguf:
        load = node(gguf_file.LOADER, unet_name=file)
    else:
        load = node("UNETLoader", unet_name=file, weight_dtype=FORMATS[form].loader if form else "default")
    latent = node(made.latent, width=size[0], height=size[1], **batch, **frames)
    return rig.sampled({"load": load, "latent": latent, **conditioning(made)}, ["load", 0], seed, steps, 1.0, "simple")


def whole(name: str, size: Size, seed: int, is_small: bool) -> dict[str, Any]:
    """Sample with each model in turn, decode, and save one frame: all would take seconds."""
    row = WHOLES[name]
    made = family(row.models[0], is_small)
    frames = {} if row.frames == 1 else {"length": 9 if is_small else row.frames}
    nodes: dict[str, Any] = {
        **conditioning(made),
        "latent": node(made.latent, width=size[0], height=size[1], batch_size=1, **frames),
        "vae": node("VAELoader", vae_name=file_of(f"{row.vae}-vae")),
    }
    texts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    if not frames:
        nodes["given"] = node("EmptyImage", width=size[0], height=size[1], batch_size=1, color=0x808080)
        nodes["encoded"] = node("VAEEncode", pixels=["given", 0], vae=["vae", 0])
        for text, link in texts.items():
            nodes[f"{text}-edit"] = node("ReferenceLatent", conditioning=link, latent=["encoded", 0])
        texts = {text: [f"{text}-edit", 0] for text in texts}
    samples = ["latent", 0]
    for number, model in enumerate(row.models):
        nodes[f"load{number}"] = node("UNETLoader", unet_name=file_of(model), weight_dtype="default")
        is_last = number == len(row.models) - 1
        nodes[f"sample{number}"] = node(
            "KSamplerAdvanced", model=[f"load{number}", 0], add_noise="disable" if number else "enable",
            noise_seed=seed, steps=row.steps * len(row.models), cfg=1.0, sampler_name="euler", scheduler="simple",
            **texts, latent_image=samples,
            start_at_step=number * row.steps, end_at_step=(number + 1) * row.steps,
            return_with_leftover_noise="disable" if is_last else "enable",
        )  # fmt: skip
        samples = [f"sample{number}", 0]
    nodes["latents"] = node("ResoluteTestSaveLatent", samples=samples, filename_prefix="latents")
    nodes |= rig.decoded(samples[0], ["vae", 0])
    nodes["one"] = node("ImageFromBatch", image=["decode", 0], batch_index=0, length=1)
    nodes["save"]["inputs"]["images"] = ["one", 0]
    return nodes


def _demo(size: Size, steps: int, seed: int) -> dict[str, Any]:
    """The demo's model draws a caption."""
    width, height, batch, caption = size
    nodes = {
        "load": node("ResoluteDemoModel"),
        "positive": node("CLIPTextEncode", clip=["load", 1], text=caption),
        "negative": node("CLIPTextEncode", clip=["load", 1], text=""),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
    }
    return rig.sampled(nodes, ["load", 0], seed, steps, 4.0)
