"""Writes the bundled workflows in UI form and API form from one description of each.

``python -m scripts.workflows.build`` writes ``workflows/`` and
``workflows/api/``; ``--check`` only reports which files differ. Needs only Python.
``scripts.pictures.screenshots`` makes the thumbnails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..places import ROOT
from . import parts
from .families import FAMILY_WORKFLOWS
from .graph import Graph, Node, Output
from .models import CONTROL_NET, LCM_LORA, SD15, SDXL
from .notes import NOTES
from .parts import COLUMN, OURS, STOCK, Prompts
from .parts import NEGATIVE as NEGATIVE  # the demo knows the texts by these names
from .parts import POSITIVE as POSITIVE

FOLDER = ROOT / "workflows"
LCM_SHAPES = ((1024, 1024), (512, 2048), (2048, 512))
# Title, preset, width and height of each size of the tour; the last has an odd latent, 73 x 57.
TOUR = (
    ("960 x 720", "960x720", 960, 720),
    ("896 x 768", "896x768", 896, 768),
    ("720 x 720", "720x720", 720, 720),
    ("640 x 960, portrait", "640x960", 640, 960),
    ("584 x 456, odd latent", "custom", 584, 456),
)
# Distance between rows in pixels.
TOUR_ROW = 430


def sd15_text_to_image() -> Graph:
    """Stock text to image with Compile Model and Compile VAE Decode."""
    return _text_to_image("sd15_text_to_image", SD15, "SD1.5 512x512", 512, 512, cfg=7.0)


def sdxl_text_to_image() -> Graph:
    """Text to image with SDXL."""
    return _text_to_image("sdxl_text_to_image", SDXL, "SDXL 1024x1024", 1024, 1024, cfg=6.0)


def oneflow_text_to_image() -> Graph:
    """Text to image with SD1.5 and the backend `oneflow`, which `auto` never chooses."""
    return _text_to_image("oneflow_text_to_image", SD15, "SD1.5 512x512", 512, 512, cfg=7.0, backend="oneflow")


def resolution_tour() -> Graph:
    """One compiled checkpoint, five sizes and the cache report."""
    graph = Graph("resolution_tour")
    group = graph.group("Checkpoint, compiled", (0, 0), OURS)
    loader = graph.add(group, "ResoluteLoadCheckpoint", ckpt_name=SD15)
    prompts = parts.prompts(graph, loader["CLIP"], (0, group.below))
    strip = _tour_stop(graph, loader, prompts, 0, None)
    for row in range(1, len(TOUR)):
        strip = _tour_stop(graph, loader, prompts, row, strip)
    group = graph.group("What it cost", (COLUMN * 7, (len(TOUR) - 2) * TOUR_ROW), OURS)
    # The report's input is the finished strip, so it runs after all sizes.
    report = graph.add(group, "ResoluteReport", wide=500, any=strip)
    graph.add(group, "PreviewImage", wide=500, images=report["image"])
    graph.add(group, "PreviewAny", wide=500, source=report["text"])
    graph.note(NOTES[graph.name], (0, graph.groups[1].below), 340, 330)
    return graph


def image_to_image() -> Graph:
    """Image to image from ComfyUI's example image, scaled to a valid size."""
    graph = Graph("image_to_image")
    model, clip, vae, loader = parts.compiled_checkpoint(graph, SD15)
    prompts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    group = graph.group("Picture", (0, graph.groups[0].below), STOCK)
    loaded = graph.add(group, "LoadImage")
    group = graph.group("Scaled to a valid size", (0, graph.groups[2].below), STOCK, rightward=True)
    size = parts.resolution(graph, group, "SD1.5 512x512", 512, 512)
    scaled = parts.scaled(graph, group, loaded["IMAGE"], size)
    # Only decoding is compiled, so the encoder uses the loader's VAE.
    latent = graph.add(group, "VAEEncode", pixels=scaled, vae=loader["VAE"])["LATENT"]
    group = graph.group("Sample", (COLUMN * 3, 0), STOCK)
    sampler = parts.sampler(graph, group, model, prompts, latent, cfg=7.0, denoise=0.6, after="randomize")
    parts.decode(graph, sampler, vae, (COLUMN * 4, 0))
    graph.note(NOTES[graph.name], (COLUMN * 3, 430), 600, 130)
    return graph


def compare_with_stock() -> Graph:
    """One checkpoint, sampled and decoded twice with the same seed: compiled and with stock ComfyUI."""
    graph = Graph("compare_with_stock")
    model, clip, vae, loader = parts.compiled_checkpoint(graph, SD15)
    prompts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    group = graph.group("Seed", (0, graph.groups[0].below), STOCK)
    seed = graph.add(group, "PrimitiveInt", title="Seed of both", value=1)["INT"]
    group = graph.group("Size", (0, graph.groups[2].below), STOCK, rightward=True)
    size = parts.resolution(graph, group, "SD1.5 512x512", 512, 512)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])["LATENT"]
    images = []
    rows = (("compiled", OURS, model, vae), ("stock", STOCK, loader["MODEL"], loader["VAE"]))
    for row, (title, color, its_model, its_vae) in enumerate(rows):
        group = graph.group(f"The {title} picture", (COLUMN * 2, row * TOUR_ROW), color, rightward=True)
        sampled = parts.sampler(graph, group, its_model, prompts, latent, cfg=7.0, seed=seed)
        image = graph.add(group, "VAEDecode", wide=240, samples=sampled["LATENT"], vae=its_vae)["IMAGE"]
        graph.add(group, "SaveImage", wide=340, images=image, filename_prefix=f"{graph.name}_{title}")
        images.append(image)
    group = graph.group("How far apart", (COLUMN * 2, 2 * TOUR_ROW), OURS, rightward=True)
    compared = graph.add(group, "ResoluteCompareImages", wide=480, image_a=images[0], image_b=images[1])
    graph.add(group, "PreviewImage", title="Heat map", wide=340, images=compared["heat_map"])
    graph.add(group, "PreviewAny", title="Report", wide=560, source=compared["text"])
    graph.note(NOTES[graph.name], (0, graph.groups[4].below), 680, 170)
    return graph


def deepcache() -> Graph:
    """Text to image with DeepCache before Compile Model."""
    graph = Graph("deepcache")
    model, clip, vae, _ = parts.compiled_checkpoint(graph, SD15, with_deepcache=True)
    texts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    group = graph.group("Size", (0, graph.groups[-1].below), STOCK, rightward=True)
    size = parts.resolution(graph, group, "SD1.5 512x512", 512, 512)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])
    group = graph.group("Sample", (COLUMN * 2, 0), STOCK)
    sampled = parts.sampler(graph, group, model, texts, latent["LATENT"], cfg=7.0, after="randomize")
    parts.decode(graph, sampled, vae, (COLUMN * 3, 0))
    graph.note(NOTES[graph.name], (COLUMN * 2, 430), 600, 170)
    return graph


def deepcache_controlnet() -> Graph:
    """DeepCache with a compiled ControlNet for the edges of an image."""
    graph = Graph("deepcache_controlnet")
    model, clip, vae, _ = parts.compiled_checkpoint(graph, SD15, with_deepcache=True)
    texts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    group = graph.group("Edges of a picture", (0, graph.groups[-1].below), STOCK, rightward=True)
    size = parts.resolution(graph, group, "SD1.5 512x512", 512, 512)
    scaled = parts.scaled_picture(graph, group, size)
    edges = graph.add(group, "Canny", image=scaled)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])
    group = graph.group("ControlNet", (COLUMN * 2, 0), OURS)
    loaded = graph.add(group, "ControlNetLoader", control_net_name=CONTROL_NET)
    net = graph.add(group, "ResoluteCompileControlNet", control_net=loaded["CONTROL_NET"])
    applied = graph.add(
        group,
        "ControlNetApplyAdvanced",
        positive=texts[0],
        negative=texts[1],
        control_net=net["CONTROL_NET"],
        image=edges["IMAGE"],
        strength=0.8,
        end_percent=0.8,
    )
    group = graph.group("Sample", (COLUMN * 3, 0), STOCK)
    sampled = parts.sampler(
        graph, group, model, (applied["positive"], applied["negative"]), latent["LATENT"], cfg=7.0, after="randomize"
    )
    parts.decode(graph, sampled, vae, (COLUMN * 4, 0))
    graph.note(NOTES[graph.name], (COLUMN * 3, 430), 600, 150)
    return graph


def lcm_image_to_image() -> Graph:
    """Image to image in three shapes with SDXL and LCM; DeepCache reports why it skips nothing."""
    graph = Graph("lcm_image_to_image")
    group = graph.group("SDXL with LCM", (0, 0), STOCK)
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=SDXL)
    lora = graph.add(group, "LoraLoaderModelOnly", model=loader["MODEL"], lora_name=LCM_LORA)
    lcm = graph.add(group, "ModelSamplingDiscrete", model=lora["MODEL"], sampling="lcm")
    group = graph.group("Compiled", (COLUMN, 0), OURS)
    cached = graph.add(group, "ResoluteDeepCache", model=lcm["MODEL"])
    model = graph.add(group, "ResoluteCompileModel", model=cached["MODEL"])
    vae = graph.add(group, "ResoluteCompileVAEDecode", vae=loader["VAE"])
    texts = parts.prompts(graph, loader["CLIP"], (COLUMN, group.below))
    picture = graph.add(graph.group("Picture", (0, group.below), STOCK), "LoadImage")["IMAGE"]
    for row, (width, height) in enumerate(LCM_SHAPES):
        group = graph.group(f"{width} x {height}", (COLUMN * 2, row * TOUR_ROW), STOCK, rightward=True)
        size = parts.resolution(graph, group, *_preset(width, height))
        scaled = parts.scaled(graph, group, picture, size)
        latent = graph.add(group, "VAEEncode", wide=240, pixels=scaled, vae=loader["VAE"])["LATENT"]
        sampled = parts.sampler(
            graph,
            group,
            model["MODEL"],
            texts,
            latent,
            cfg=1.5,
            denoise=0.7,
            steps=6,
            sampler_name="lcm",
            scheduler="sgm_uniform",
        )
        image = graph.add(group, "VAEDecode", wide=240, samples=sampled["LATENT"], vae=vae["VAE"])["IMAGE"]
        graph.add(group, "SaveImage", images=image, filename_prefix=f"{graph.name}_{width}x{height}")
    graph.note(NOTES[graph.name], (0, graph.groups[2].below), 680, 150)
    return graph


def _preset(width: int, height: int) -> tuple[str, int, int]:
    return ("SDXL 1024x1024" if width == height else "custom"), width, height


def _text_to_image(
    name: str, checkpoint: str, preset: str, width: int, height: int, cfg: float, backend: str = "auto"
) -> Graph:
    graph = Graph(name)
    model, clip, vae, _ = parts.compiled_checkpoint(graph, checkpoint, backend=backend)
    prompts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    group = graph.group("Size", (0, graph.groups[-1].below), STOCK, rightward=True)
    size = parts.resolution(graph, group, preset, width, height)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])
    group = graph.group("Sample", (COLUMN * 2, 0), STOCK)
    sampler = parts.sampler(graph, group, model, prompts, latent["LATENT"], cfg=cfg, after="randomize")
    parts.decode(graph, sampler, vae, (COLUMN * 3, 0))
    graph.note(NOTES[graph.name], (COLUMN * 2, 430), 600, 150)
    return graph


def _tour_stop(graph: Graph, loader: Node, prompts: Prompts, row: int, strip: Output | None) -> Output:
    """Add one row: size, latent, sampler, decoder, file. Returns the strip with its image appended."""
    title, preset, width, height = TOUR[row]
    group = graph.group(title, (COLUMN, row * TOUR_ROW), STOCK, rightward=True)
    size = parts.resolution(graph, group, preset, width, height)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])
    sampled = parts.sampler(graph, group, loader["MODEL"], prompts, latent["LATENT"], cfg=7.0)
    decoded = graph.add(group, "VAEDecode", samples=sampled["LATENT"], vae=loader["VAE"])
    image, prefix = decoded["IMAGE"], f"{graph.name}_{width}x{height}"
    graph.add(group, "SaveImage", images=image, filename_prefix=prefix)
    if strip is None:
        return image
    node = graph.add(group, "ImageStitch", image1=strip, image2=image, spacing_width=8)
    return node["IMAGE"]


WORKFLOWS: tuple[Callable[[], Graph], ...] = (
    sd15_text_to_image,
    sdxl_text_to_image,
    oneflow_text_to_image,
    resolution_tour,
    image_to_image,
    compare_with_stock,
    deepcache,
    deepcache_controlnet,
    lcm_image_to_image,
)


def rendered() -> dict[str, str]:
    """The files that belong in ``workflows/``: relative path -> text."""
    texts: dict[str, str] = {}
    for build in (*WORKFLOWS, *FAMILY_WORKFLOWS):
        graph = build()
        texts[f"{graph.template}.json"] = _text(graph.ui())
        texts[f"api/{graph.name}.json"] = _text(graph.api())
    return texts


def differing(folder: Path = FOLDER) -> list[str]:
    """Files in ``folder`` that are missing, differ from ``rendered()``, or belong to no workflow."""
    wanted = rendered()
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")}
    return sorted(
        name
        for name in found | set(wanted)
        if name not in found or (folder / name).read_text("utf-8") != wanted.get(name)
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, report which files differ")
    if parser.parse_args(arguments).check:
        names = differing()
        for name in names:
            print(f"workflows/{name} differs: run python -m scripts.workflows.build")
        return 1 if names else 0
    for name, text in rendered().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
        print(f"workflows/{name}")
    return 0


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
