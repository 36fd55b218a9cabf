"""The scanner on a real server: rules compared with the real nodes, and scans compared with what a run used."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.places import ROOT
from scripts.server.client import Client
from scripts.server.process import ComfyServer
from scripts.setup import comfyui
from scripts.workflows import UNETS

from .rig import Bench, PromptDict, node

BUNDLED = sorted(UNETS)  # the others take no tiny UNet
CHANNELS = 4
WIDTHS = {"sd": {"width": 768, "pooled_width": 0}, "sdxl": {"width": 2048, "pooled_width": 1280}}

Shapes = set[tuple[str, tuple[int, ...]]]  # role and latent shape, N x C x H x W


@pytest.fixture(scope="module")
def example(server: ComfyServer, comfyui_folder: Callable[[str], Path]) -> tuple[int, int]:
    """Copy ComfyUI's example image into the input folder. Its width and height."""
    from PIL import Image

    source = comfyui_folder(comfyui.TARGET) / "input" / "example.png"
    shutil.copyfile(source, server.input_folder / source.name)
    with Image.open(source) as picture:
        return picture.size


def test_every_class_with_a_rule_exists_and_is_not_an_output_node(client: Client, pack: Any) -> None:
    known = client.get("/object_info")
    rules = pack("nodes.adapters.scan.rules").RULES
    assert sorted(rules.keys() - known.keys()) == []
    assert [name for name in rules if known[name]["output_node"]] == []


def latent_nodes(draw: random.Random) -> PromptDict:
    """Every node with a rule that outputs latents, at random sizes that make each of them round."""

    def side(least: int = 64, most: int = 320) -> int:
        return draw.randint(least, most)

    one = {"samples": ["one", 0]}
    two = {"samples1": ["one", 0], "samples2": ["two", 0]}
    same_height = {"samples1": ["one", 0], "samples2": ["wide", 0]}
    width, height = side(), side()
    return {
        "one": node("EmptyLatentImage", width=width, height=height, batch_size=3),
        "two": node("EmptyLatentImage", width=side(), height=side(), batch_size=2),
        "wide": node("EmptyLatentImage", width=side(), height=height, batch_size=1),
        "sd3": node("EmptySD3LatentImage", width=side(), height=side(), batch_size=2),
        "flux2": node("EmptyFlux2LatentImage", width=side(), height=side(), batch_size=2),
        "ltx": node("EmptyLTXVLatentVideo", width=side(), height=side(), length=9, batch_size=2),
        "hunyuan": node("EmptyHunyuanLatentVideo", width=side(), height=side(), length=9, batch_size=1),
        "hunyuan15": node("EmptyHunyuanVideo15Latent", width=side(), height=side(), length=9, batch_size=2),
        "hunyuan-image": node("EmptyHunyuanImageLatent", width=side(), height=side(), batch_size=1),
        "upscale": node("LatentUpscale", **one, upscale_method="bilinear", crop="center", width=side(), height=side()),
        "upscale-w": node("LatentUpscale", **one, upscale_method="area", crop="disabled", width=side(), height=0),
        "upscale-h": node("LatentUpscale", **one, upscale_method="area", crop="disabled", width=0, height=side(1, 90)),
        "upscale-0": node("LatentUpscale", **one, upscale_method="area", crop="disabled", width=0, height=0),
        "by": node("LatentUpscaleBy", **one, upscale_method="bicubic", scale_by=round(draw.uniform(0.3, 2.5), 2)),
        "by-half": node("LatentUpscaleBy", **one, upscale_method="nearest-exact", scale_by=1.5),
        "crop": node("LatentCrop", **one, width=side(), height=side(), x=side(0, 400), y=side(0, 100)),
        "cut": node("LatentCut", **one, dim="x", index=draw.randint(-50, 50), amount=draw.randint(1, 60)),
        "cut-y": node("LatentCut", **one, dim="y", index=draw.randint(-50, 50), amount=draw.randint(1, 60)),
        "rotate": node("LatentRotate", **one, rotation="90 degrees"),
        "flip": node("LatentFlip", **one, flip_method="x-axis: vertically"),
        "from": node("LatentFromBatch", **one, batch_index=draw.randint(-4, 4), length=draw.randint(1, 4)),
        "repeat": node("RepeatLatentBatch", **one, amount=draw.randint(1, 4)),
        "batch": node("LatentBatch", **two),
        "batches": node("BatchLatentsNode", **{"latents.latent0": ["two", 0], "latents.latent1": ["one", 0]}),
        "add": node("LatentAdd", **two),
        "subtract": node("LatentSubtract", **two),
        "interpolate": node("LatentInterpolate", samples1=["single", 0], samples2=["wide", 0], ratio=0.5),
        "multiply": node("LatentMultiply", **one, multiplier=2.0),
        "blend": node("LatentBlend", samples1=["one", 0], samples2=["single", 0], blend_factor=0.5),
        "single": node("LatentFromBatch", **one, batch_index=1, length=1),
        "concat": node("LatentConcat", **same_height, dim="-x"),
        "composite": node("LatentComposite", samples_to=["one", 0], samples_from=["wide", 0], x=8, y=16, feather=0),
        "composite-m": node(
            "LatentCompositeMasked", destination=["one", 0], source=["two", 0], x=8, y=0, resize_source=False
        ),
        "seeds": node("LatentBatchSeedBehavior", **one, seed_behavior="fixed"),
    }


def image_nodes(draw: random.Random) -> PromptDict:
    """Every node with a rule that outputs images or numbers. The images are small because they are saved."""

    def side(least: int = 20, most: int = 150) -> int:
        return draw.randint(least, most)

    def resize(way: str, **more: Any) -> dict[str, Any]:
        choices = {f"resize_type.{name}": value for name, value in more.items()}
        return node("ResizeImageMaskNode", input=["one", 0], resize_type=way, scale_method="area", **choices)

    one, scale = {"image": ["one", 0]}, {"upscale_method": "bilinear", "crop": "disabled"}
    pair = {"image1": ["one", 0], "image2": ["two", 0]}
    edges = {"left": side(0), "top": side(0), "right": side(0), "bottom": side(0), "feathering": 0}
    pixels, multiple = round(draw.uniform(0.01, 0.05), 2), draw.randint(2, 20)
    return {
        "one": node("EmptyImage", width=side(), height=side(), batch_size=2, color=7),
        "two": node("EmptyImage", width=side(), height=side(), batch_size=1, color=7),
        "loaded": node("LoadImage", image="example.png"),
        "scale": node("ImageScale", **one, **scale, width=side(), height=side()),
        "scale-w": node("ImageScale", **one, **scale, width=side(), height=0),
        "scale-h": node("ImageScale", **one, **scale, width=0, height=side()),
        "scale-0": node("ImageScale", **one, **scale, width=0, height=0),
        "by": node("ImageScaleBy", **one, upscale_method="area", scale_by=round(draw.uniform(0.3, 2.0), 2)),
        "by-half": node("ImageScaleBy", **one, upscale_method="area", scale_by=0.5),
        "pixels": node("ImageScaleToTotalPixels", **one, upscale_method="area", megapixels=pixels, resolution_steps=1),
        "steps": node("ImageScaleToTotalPixels", **one, upscale_method="area", megapixels=pixels, resolution_steps=7),
        "longest": node("ImageScaleToMaxDimension", **one, upscale_method="area", largest_size=side()),
        "crop": node("ImageCrop", **one, width=side(), height=side(), x=side(0), y=side(0)),
        "pad": node("ImagePadForOutpaint", **one, **edges),
        "pad-to": node(
            "ResizeAndPadImage", **one, target_width=side(), target_height=side(),
            padding_color="white", interpolation="area",
        ),
        "rotate": node("ImageRotate", **one, rotation="270 degrees"),
        "flip": node("ImageFlip", **one, flip_method="y-axis: horizontally"),
        "invert": node("ImageInvert", **one),
        "blur": node("ImageBlur", **one, blur_radius=1, sigma=1.0),
        "edges": node("Canny", **one, low_threshold=0.4, high_threshold=0.8),
        "batch": node("ImageBatch", **pair),
        "batches": node("BatchImagesNode", **{"images.image0": ["two", 0], "images.image1": ["one", 0]}),
        "repeat": node("RepeatImageBatch", **one, amount=2),
        "from": node("ImageFromBatch", **one, batch_index=draw.randint(-3, 3), length=draw.randint(1, 3)),
        "composite": node(
            "ImageCompositeMasked", destination=["one", 0], source=["two", 0], x=3, y=5, resize_source=False
        ),
        "r-size": resize("scale dimensions", width=side(), height=0, crop="center"),
        "r-by": resize("scale by multiplier", multiplier=round(draw.uniform(0.3, 2.0), 2)),
        "r-long": resize("scale longer dimension", longer_size=side()),
        "r-short": resize("scale shorter dimension", shorter_size=side()),
        "r-w": resize("scale width", width=side()),
        "r-h": resize("scale height", height=side()),
        "r-pixels": resize("scale total pixels", megapixels=pixels),
        "r-match": resize("match size", match=["two", 0], crop="center"),
        "r-multiple": resize("scale to multiple", multiple=multiple),
        "size": node("GetImageSize", image=["r-w", 0]),
        "selector": node("ResolutionSelector", aspect_ratio="16:9 (Widescreen)", megapixels=0.1, multiple=12),
        "ours": node("ResoluteResolution", preset="custom", width=8 * side(8), height=8 * side(8), multiple="8"),
        "int": node("PrimitiveInt", value=side()),
        "float": node("PrimitiveFloat", value=draw.uniform(0.3, 1.9)),
        "string": node("PrimitiveString", value=f"{side()}.6"),
        "convert": node("ComfyNumberConvert", value=["string", 0]),
        "truth": node("PrimitiveBoolean", value=draw.random() < 0.5),
        "switch": node("ComfySwitchNode", switch=["truth", 0], on_true=["one", 0], on_false=["two", 0]),
        "n-1": node("EmptyImage", width=["size", 0], height=["size", 1], batch_size=["size", 2], color=1),
        "n-2": node("EmptyImage", width=["selector", 0], height=["ours", 1], batch_size=1, color=1),
        "n-3": node("EmptyImage", width=["convert", 1], height=["int", 0], batch_size=1, color=1),
        "n-4": node("ImageScaleBy", image=["one", 0], upscale_method="area", scale_by=["float", 0]),
    }  # fmt: skip


def encoder_nodes(draw: random.Random) -> PromptDict:
    """Every node that encodes an image, or adds a mask or conditioning to a latent."""
    text = node("ResoluteTestConditioning", seed=1, tokens=77, width=768, pooled_width=0, batch=1)
    pixels, tile = {"pixels": ["picture", 0], "vae": ["vae", 0]}, {"tile_size": 64, "overlap": 16}
    texts = {"positive": ["text", 0], "negative": ["text", 0]}
    return {
        "vae": node("ResoluteTestTinyVAE", seed=1),
        "text": text,
        "picture": node("EmptyImage", width=draw.randint(64, 150), height=draw.randint(64, 150), batch_size=2, color=9),
        "mask": node("SolidMask", value=1.0, width=64, height=64),
        "encode": node("VAEEncode", **pixels),
        "encode-tiled": node("VAEEncodeTiled", **pixels, **tile, temporal_size=64, temporal_overlap=8),
        "encode-inpaint": node("VAEEncodeForInpaint", **pixels, mask=["mask", 0], grow_mask_by=6),
        "encode-model": node("InpaintModelConditioning", **pixels, **texts, mask=["mask", 0], noise_mask=True),
        "masked": node("SetLatentNoiseMask", samples=["encode", 0], mask=["mask", 0]),
        "decode": node("VAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "encode-again": node("VAEEncode", pixels=["decode", 0], vae=["vae", 0]),
    }


NUMBERS = {"size", "selector", "ours", "int", "float", "string", "convert", "truth"}


@pytest.mark.parametrize("draw", range(4))
@pytest.mark.parametrize("nodes", [latent_nodes, encoder_nodes], ids=lambda nodes: nodes.__name__)
def test_rules_give_the_latents_of_the_real_nodes(
    bench: Bench, pack: Any, draw: int, nodes: Callable[[random.Random], PromptDict]
) -> None:
    prompt = nodes(random.Random(draw))
    links = {name: [name, 0] for name in prompt if name not in ("vae", "text", "picture", "mask", "decode")}
    if "encode-model" in links:
        links["encode-model"] = ["encode-model", 2]
    saves = {f"save {name}": node("ResoluteTestSaveLatent", samples=links[name], filename_prefix="s") for name in links}
    run = bench.run({**prompt, **saves})
    made = {}
    for name, latent in zip(sorted(saves, key=lambda name: (len(name), name)), run.latents, strict=True):
        made[name.removeprefix("save ")] = (latent.shape[-1], latent.shape[-2], latent.shape[0])
    _, values = pack("nodes.adapters.scan.workflow").evaluate(prompt, None)
    assert {name: size_of(values[name], output) for name, (_, output) in links.items()} == made


@pytest.mark.parametrize("draw", range(4))
def test_rules_give_the_images_of_the_real_nodes(bench: Bench, pack: Any, example: tuple[int, int], draw: int) -> None:
    prompt = image_nodes(random.Random(draw))
    pictures = prompt.keys() - NUMBERS
    saves = {f"save {name}": node("SaveImage", images=[name, 0], filename_prefix="s") for name in pictures}
    run = bench.run({**prompt, **saves})
    sizes = iter((image.shape[1], image.shape[0]) for image in run.images)
    made = {}
    for name in sorted(saves, key=lambda name: (len(name), name)):
        batch = [next(sizes) for _ in run.history["outputs"][name]["images"]]
        made[name.removeprefix("save ")] = (*batch[0], len(batch))
    _, values = pack("nodes.adapters.scan.workflow").evaluate(prompt, {"example.png": example}.get)
    assert {name: size_of(values[name]) for name in pictures} == made


def size_of(outputs: Any, output: int = 0) -> tuple[int, int, int]:
    """(width, height, batch). A NotKnownError fails the test with its message."""
    assert isinstance(outputs, tuple), str(outputs)
    value = outputs[output]
    return value.width, value.height, value.batch


class Compared:
    """Runs prompts on the server, and compares the signatures of the run with what the scanner found."""

    def __init__(self, bench: Bench, pack: Any, image_sizes: dict[str, tuple[int, int]] | None = None) -> None:
        self.bench = bench
        self.scan = lambda prompt: pack("nodes.adapters.scan.workflow").scan(prompt, image_size=(image_sizes or {}).get)
        self.warm_up_prompt = lambda prompt: (
            pack("nodes.adapters.warm_up.prompt").warm_up_prompt(prompt, self.scan(prompt)).prompt
        )

    def used(self, prompt: PromptDict) -> Shapes:
        """The new signatures of a run, from its events. Each signature has one event, when it is first used.

        A scan finds samplers and decoders, so ControlNets and encodes are left out.
        """
        _, texts = self.bench.signatures(prompt)
        found = [text.split(":")[0].split() for text in texts if not text.startswith(("controlnet", "vae_encode"))]
        return {(_role(role), tuple(map(int, shape.split("x")))) for role, shape in found}

    def found(self, prompt: PromptDict) -> Shapes:
        """The scan as signatures: positive and negative in one batch, and each tile of a tiled decode."""
        found = self.scan(prompt)
        assert found.unknown == ()
        assert found.samplings
        shapes: Shapes = set()
        for sampling in found.samplings:
            conds = 1 if sampling.cfg == 1.0 else 2
            cells = (sampling.size.height // 8, sampling.size.width // 8)
            shapes.add(("model", (sampling.batch * conds, CHANNELS, *cells)))
        for decoding in found.decodings:
            cells = (decoding.size.height // 8, decoding.size.width // 8)
            if decoding.tile_size is None:
                shapes.add(("decoder", (decoding.batch, CHANNELS, *cells)))
            else:
                shapes |= {("decoder", (1, CHANNELS, *tile)) for tile in tiles(cells, decoding)}
        return shapes


def _role(role: str) -> str:
    return {"vae_decode": "decoder"}.get(role, "model")


def tiles(cells: tuple[int, int], decoding: Any) -> Shapes:
    """Height and width of each tile, in latent pixels. Core decodes three times: in square, tall and wide tiles."""
    tile, overlap = decoding.tile_size // 8, decoding.overlap // 8

    def along(side: int, size: int) -> set[int]:
        starts = range(0, side - overlap, size - overlap) if side > size else [0]
        return {min(size, side - max(0, min(side - overlap, start))) for start in starts}

    passes = ((tile, tile), (tile * 2, tile // 2), (tile // 2, tile * 2))
    return {
        (height, width) for tall, wide in passes for height in along(cells[0], tall) for width in along(cells[1], wide)
    }


@pytest.fixture
def compared(bench: Bench, pack: Any) -> Compared:
    return Compared(bench, pack)


@pytest.fixture
def tiny(tiny_prompt: Any, seed: int) -> Callable[..., PromptDict]:
    """The tiny prompt, compiled. Model and VAE are new in each test, so that every signature is new."""

    def make(**choices: Any) -> PromptDict:
        prompt: PromptDict = tiny_prompt(seed=seed, steps=1, **choices)
        prompt["model"]["inputs"]["seed"] = prompt["vae"]["inputs"]["seed"] = seed
        merged = {"backend": "inductor", "batching": "always merge"}
        prompt["compiled"] = node("ResoluteCompileModel", model=["model", 0], **merged)
        prompt["decoder"] = node("ResoluteCompileVAEDecode", vae=["vae", 0], backend="inductor")
        prompt["sample"]["inputs"]["model"] = ["compiled", 0]
        prompt["decode"]["inputs"]["vae"] = ["decoder", 0]
        return prompt

    return make


def plain(tiny: Any) -> PromptDict:
    return dict(tiny(width=136, height=104))


def positive_alone(tiny: Any) -> PromptDict:
    return dict(tiny(width=104, height=136, batch=3, cfg=1.0))


def batch_of_two(tiny: Any) -> PromptDict:
    return dict(tiny(width=72, height=200, batch=2))


def tiled(tiny: Any) -> PromptDict:
    prompt = tiny(width=360, height=200)
    sizes = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    return {**prompt, "decode": node("VAEDecodeTiled", **prompt["decode"]["inputs"], **sizes)}


def second_pass(prompt: PromptDict, latent: str) -> PromptDict:
    again = {**prompt["sample"]["inputs"], "latent_image": [latent, 0], "denoise": 1.0}
    last = {"samples": ["again", 0], "vae": ["decoder", 0]}
    return {**prompt, "again": node("KSampler", **again), "decode": node("VAEDecode", **last)}


def latent_hires_fix(tiny: Any) -> PromptDict:
    """17 x 13 latent pixels times 1.5: 25.5 and 19.5, which round to the even 26 and 20."""
    prompt = second_pass(tiny(width=136, height=104), "bigger")
    prompt["bigger"] = node("LatentUpscaleBy", samples=["sample", 0], upscale_method="nearest-exact", scale_by=1.5)
    return prompt


def image_hires_fix(tiny: Any) -> PromptDict:
    """104 x 88 pixels times 1.7: 177 x 150, which the VAE crops to 22 x 18 latent pixels."""
    prompt = second_pass(tiny(width=104, height=88, batch=2), "encoded")
    prompt["first"] = node("VAEDecode", samples=["sample", 0], vae=["decoder", 0])
    prompt["bigger"] = node("ImageScaleBy", image=["first", 0], upscale_method="area", scale_by=1.7)
    prompt["encoded"] = node("VAEEncode", pixels=["bigger", 0], vae=["vae", 0])
    return prompt


def batch_workflow(tiny: Any) -> PromptDict:
    """Two latents in a batch, repeated to four; three of them are decoded."""
    prompt = tiny(width=88, height=64)
    prompt["other"] = node("EmptyLatentImage", width=128, height=128, batch_size=1)
    prompt["both"] = node("LatentBatch", samples1=["latent", 0], samples2=["other", 0])
    prompt["four"] = node("RepeatLatentBatch", samples=["both", 0], amount=2)
    prompt["three"] = node("LatentFromBatch", samples=["sample", 0], batch_index=1, length=64)
    prompt["sample"]["inputs"]["latent_image"] = ["four", 0]
    prompt["decode"]["inputs"]["samples"] = ["three", 0]
    return dict(prompt)


def custom_sampling(tiny: Any) -> PromptDict:
    prompt = tiny(width=96, height=80)
    texts = {name: prompt["sample"]["inputs"][name] for name in ("model", "positive", "negative")}
    prompt["guider"] = node("CFGGuider", **texts, cfg=4.0)
    prompt["noise"] = node("RandomNoise", noise_seed=5)
    prompt["euler"] = node("KSamplerSelect", sampler_name="euler")
    prompt["sigmas"] = node("BasicScheduler", model=["compiled", 0], scheduler="simple", steps=1, denoise=1.0)
    links = {"noise": "noise", "guider": "guider", "sampler": "euler", "sigmas": "sigmas", "latent_image": "latent"}
    prompt["sample"] = node("SamplerCustomAdvanced", **{name: [source, 0] for name, source in links.items()})
    return dict(prompt)


WORKFLOWS = (
    plain,
    positive_alone,
    batch_of_two,
    tiled,
    latent_hires_fix,
    image_hires_fix,
    batch_workflow,
    custom_sampling,
)
each_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.__name__)


@pytest.mark.grid(3)
@each_workflow
def test_a_scan_finds_the_signatures_that_a_run_uses(
    compared: Compared, tiny: Any, workflow: Callable[[Any], PromptDict]
) -> None:
    prompt = workflow(tiny)
    assert compared.used(prompt) == compared.found(prompt)


@pytest.mark.grid(3)
@each_workflow
def test_after_a_warm_up_the_workflow_has_no_new_signature(
    compared: Compared, tiny: Any, workflow: Callable[[Any], PromptDict]
) -> None:
    prompt = workflow(tiny)
    warmed = compared.used(compared.warm_up_prompt(prompt))
    assert warmed == compared.found(prompt)
    assert compared.used(prompt) == set()


def test_the_size_of_a_loaded_image_is_used(bench: Bench, pack: Any, tiny: Any, example: tuple[int, int]) -> None:
    prompt = tiny()
    prompt["picture"] = node("LoadImage", image="example.png")
    prompt["smaller"] = node("ImageScaleBy", image=["picture", 0], upscale_method="area", scale_by=0.17)
    prompt["latent"] = node("VAEEncode", pixels=["smaller", 0], vae=["vae", 0])
    compared = Compared(bench, pack, {"example.png": example})
    assert compared.used(prompt) == compared.found(prompt)


def with_tiny_models(workflow: str, seed: int) -> PromptDict:
    """A bundled workflow with tiny models in place of model files, a quarter of its sizes, and one step."""
    prompt: PromptDict = json.loads((ROOT / "workflows" / "api" / f"{workflow}.json").read_text("utf-8"))
    kind = "sdxl" if workflow.startswith(("sdxl", "lcm")) else "sd"
    moved: dict[tuple[str, int], list[Any]] = {}
    for name, part in list(prompt.items()):
        inputs, class_type = part["inputs"], part["class_type"]
        if "ckpt_name" in inputs:
            prompt[name] = node("ResoluteTestTinyModel", seed=seed, kind=kind)
            prompt[f"{name}-vae"] = node("ResoluteTestTinyVAE", seed=seed)
            moved[name, 2] = [f"{name}-vae", 0]
        if class_type == "ResoluteLoadCheckpoint":
            prompt[f"{name}-c"] = node("ResoluteCompileModel", model=[name, 0], backend="inductor", batching="auto")
            prompt[f"{name}-d"] = node("ResoluteCompileVAEDecode", vae=[f"{name}-vae", 0], backend="inductor")
            moved |= {(name, 0): [f"{name}-c", 0], (name, 2): [f"{name}-d", 0]}
        elif class_type == "LoraLoaderModelOnly":
            moved[name, 0] = prompt.pop(name)["inputs"]["model"]
        elif class_type == "ControlNetLoader":
            prompt[name] = node("ResoluteTestControlNet", kind=kind, seed=21)
        elif class_type == "CLIPTextEncode":
            prompt[name] = node("ResoluteTestConditioning", seed=int(name), tokens=77, batch=1, **WIDTHS[kind])
        elif class_type == "ResoluteResolution":
            sides = {name: inputs[name] // 32 * 8 for name in ("width", "height")}
            inputs.update(preset="custom", **sides)
        elif class_type == "KSampler":
            inputs.update(seed=seed, steps=1)
    for name, part in prompt.items():
        if "backend" in part["inputs"]:
            part["inputs"]["backend"] = "inductor"
        if part["class_type"] == "ResoluteCompileModel":
            part["inputs"]["batching"] = "always merge"
        for key, value in part["inputs"].items():
            if isinstance(value, list) and not name.endswith(("-c", "-d")):
                part["inputs"][key] = moved.get((value[0], value[1]), value)
    return prompt


@pytest.mark.grid(3)
@pytest.mark.parametrize("workflow", BUNDLED)
def test_a_bundled_workflow_uses_the_signatures_that_a_scan_finds(
    bench: Bench, pack: Any, seed: int, example: tuple[int, int], workflow: str
) -> None:
    compared = Compared(bench, pack, {"example.png": example})
    prompt = with_tiny_models(workflow, seed)
    assert compared.used(prompt) == compared.found(prompt)


@pytest.fixture
def command(client: Client, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`command(workflow)`: run scripts/warm-up with a file that holds this workflow or this text."""

    def run(workflow: Any, server: str = client.url) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "workflow.json"
        file.write_text(workflow if isinstance(workflow, str) else json.dumps(workflow), "utf-8")
        line = [sys.executable, str(ROOT / "scripts" / "warm-up"), str(file), "--server", server]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)

    return run


class TestTheCommand:
    def test_it_prints_shapes_and_report_and_then_the_workflow_has_no_new_signature(
        self, compared: Compared, tiny: Any, command: Any
    ) -> None:
        prompt = latent_hires_fix(tiny)
        done = command(prompt)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        items = [line for line in lines if line.startswith("to warm up: ")]
        assert len(items) == 3  # two samplers, one decoder
        assert [line for line in lines if line.startswith("warming ")] != []
        assert sum(int(line.split()[0]) for line in lines if " warmed; " in line) == 3
        assert compared.used(prompt) == set()

    def test_it_prints_what_cannot_be_known(self, tiny: Any, command: Any) -> None:
        prompt = tiny(width=72, height=64)
        prompt["mystery"] = node("SomeonesNode", samples=["sample", 0])
        prompt["again"] = node("KSampler", **{**prompt["sample"]["inputs"], "latent_image": ["mystery", 0]})
        prompt["end"] = node("ResoluteTestSaveLatent", samples=["again", 0], filename_prefix="s")
        done = command(prompt)
        assert done.returncode == 0
        assert "not known: SomeonesNode mystery: Resolute does not know" in done.stdout

    def test_it_fails_if_a_shape_fails(self, tiny: Any, command: Any) -> None:
        prompt = tiny(width=72, height=64)
        prompt["failing"] = node("ResoluteTestFailingPatch", model=["compiled", 0], step=0)
        prompt["sample"]["inputs"]["model"] = ["failing", 0]
        done = command(prompt)
        assert done.returncode == 1
        assert "asked to fail at step 0" in done.stdout
        assert "1 could not be warmed up" in done.stdout

    def test_it_names_the_node_that_comfyui_refuses(self, tiny: Any, command: Any) -> None:
        prompt = tiny(width=72, height=64)
        prompt["model"]["inputs"]["kind"] = "no such kind"
        done = command(prompt)
        assert done.returncode == 1
        assert "node model (ResoluteTestTinyModel)" in done.stderr

    @pytest.mark.parametrize(
        ("workflow", "sentence"),
        [
            ({"nodes": [], "links": []}, "not in API form. In ComfyUI choose File, Export (API)"),
            ("{", "is not JSON"),
            ("[]", "not a workflow in API form"),
        ],
    )
    def test_anything_but_a_workflow_in_api_form_is_refused(self, command: Any, workflow: Any, sentence: str) -> None:
        done = command(workflow)
        assert (done.returncode, done.stdout) == (1, "")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1

    def test_a_missing_server_is_named(self, command: Any) -> None:
        done = command({}, server="http://127.0.0.1:9")
        assert done.returncode == 1
        assert "error: http://127.0.0.1:9 does not answer" in done.stderr


def test_the_rule_of_resolution_knows_all_of_its_inputs(client: Client) -> None:
    inputs = client.get("/object_info/ResoluteResolution")["ResoluteResolution"]["input"]
    known = {"preset", "width", "height", "multiple", "use"}
    assert {name for group in ("required", "optional") for name in inputs[group]} == known
