"""Writes the bundled workflows, UI form and API form, from one description of each.

``python -m scripts.support.build_workflows`` writes ``workflows/`` and
``workflows/api/``; with ``--check`` it only says which files differ. Needs nothing but
Python. Thumbnails are made by ``scripts.support.workflow_pictures``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .places import ROOT
from .workflow_graph import Graph, Group, Node, Output

FOLDER = ROOT / "workflows"
SD15, SDXL = "sd15.safetensors", "sdxl.safetensors"
POSITIVE = "a lighthouse on a cliff at dusk, waves, warm light in the windows, detailed painting"
NEGATIVE = "blurry, low quality, text, watermark"
# Title, preset, width, height of each size of the tour; the last has an odd latent, 73 x 57.
TOUR = (
    ("960 x 720", "960x720", 960, 720),
    ("896 x 768", "896x768", 896, 768),
    ("720 x 720", "720x720", 720, 720),
    ("640 x 960, portrait", "640x960", 640, 960),
    ("584 x 456, odd latent", "custom", 584, 456),
)
# Frames around our nodes, and around ComfyUI's own.
OURS, STOCK = "#2f7f86", "#3f789e"
Prompts = tuple[Output, Output]  # positive, negative
_TEXT_TO_IMAGE_NOTE = """## Text to image, compiled
1. Choose your checkpoint.
2. Queue. The first run compiles; the node shows how far it is.
3. Change `preset` in **Resolution** and queue again: nothing compiles, whatever the size.

The cyan nodes are all that was added to ComfyUI's own graph."""
# Pixels from one column to the next, and from one row of the tour to the next.
COLUMN, TOUR_ROW = 380, 400
NOTES = {
    "sd15_text_to_image": _TEXT_TO_IMAGE_NOTE,
    "sdxl_text_to_image": _TEXT_TO_IMAGE_NOTE,
    "resolution_tour": """## One model, five sizes
1. Choose your checkpoint in **Load Checkpoint (Compiled)** and queue.
2. The first size compiles. The other four compile **nothing**: they share its blocks.
3. **Graph Cache Report** at the bottom right lists each size with its compiles, replays and stalls.""",
    "image_to_image": """## Image to image, compiled
1. Choose your checkpoint and a picture.
2. Queue. The first run compiles; the node shows how far it is.
3. Change `preset` in **Resolution**, or `denoise`, and queue again: nothing compiles.""",
    "compare_with_stock": """## The same seed, compiled and not
1. Choose your checkpoint.
2. Queue. The upper row samples and decodes compiled, the lower one is stock ComfyUI.
3. **Compare Images** tells how far the two are apart, and where. On a GPU half precision rounds.
4. Set `min_psnr`, for example to 30: then the prompt fails if the pictures are further apart.""",
}


def sd15_text_to_image() -> Graph:
    """Stock text to image with Compile Model and Compile VAE Decode put in between."""
    return _text_to_image("sd15_text_to_image", SD15, "SD1.5 512x512", 512, 512, cfg=7.0)


def sdxl_text_to_image() -> Graph:
    """The same for SDXL."""
    return _text_to_image("sdxl_text_to_image", SDXL, "SDXL 1024x1024", 1024, 1024, cfg=6.0)


def resolution_tour() -> Graph:
    """One compiled checkpoint, five sizes, and the report of what that cost."""
    graph = Graph("resolution_tour")
    group = graph.group("Checkpoint, compiled", (0, 0), OURS)
    loader = graph.add(group, "ResoluteLoadCheckpoint", ckpt_name=SD15)
    prompts = _prompts(graph, loader["CLIP"], (0, 300))
    strip = _tour_stop(graph, loader, prompts, 0, None)
    for row in range(1, len(TOUR)):
        strip = _tour_stop(graph, loader, prompts, row, strip)
    group = graph.group("What it cost", (COLUMN * 7, (len(TOUR) - 2) * TOUR_ROW), OURS)
    # The report takes the finished strip, so it runs after every size.
    report = graph.add(group, "ResoluteReport", wide=500, any=strip)
    graph.add(group, "PreviewImage", wide=500, images=report["image"])
    graph.add(group, "PreviewAny", wide=500, source=report["text"])
    graph.note(NOTES[graph.name], (0, 730), 340, 330)
    return graph


def image_to_image() -> Graph:
    """ComfyUI's example picture, scaled to a valid size and drawn again."""
    graph = Graph("image_to_image")
    model, clip, vae, loader = _compiled_checkpoint(graph, SD15)
    prompts = _prompts(graph, clip, (COLUMN, 320))
    group = graph.group("Picture", (0, 220), STOCK)
    loaded = graph.add(group, "LoadImage")
    group = graph.group("Scaled to a valid size", (0, 740), STOCK, rightward=True)
    size = _resolution(graph, group, "SD1.5 512x512", 512, 512)
    scaled = graph.add(
        group,
        "ImageScale",
        image=loaded["IMAGE"],
        upscale_method="lanczos",
        width=size["width"],
        height=size["height"],
        crop="center",
    )
    # Only decoding is compiled: the encoder takes the VAE from the loader.
    latent = graph.add(group, "VAEEncode", pixels=scaled["IMAGE"], vae=loader["VAE"])["LATENT"]
    group = graph.group("Sample", (COLUMN * 3, 0), STOCK)
    sampler = _sampler(graph, group, model, prompts, latent, cfg=7.0, denoise=0.6, after="randomize")
    _decode(graph, sampler, vae, (COLUMN * 4, 0))
    graph.note(NOTES[graph.name], (COLUMN * 3, 430), 600, 110)
    return graph


def compare_with_stock() -> Graph:
    """One checkpoint, sampled and decoded twice with the same seed: compiled, and by ComfyUI alone."""
    graph = Graph("compare_with_stock")
    model, clip, vae, loader = _compiled_checkpoint(graph, SD15)
    prompts = _prompts(graph, clip, (COLUMN, 320))
    seed = graph.add(graph.group("Seed", (0, 320), STOCK), "PrimitiveInt", title="Seed of both", value=1)["INT"]
    group = graph.group("Size", (0, 740), STOCK, rightward=True)
    size = _resolution(graph, group, "SD1.5 512x512", 512, 512)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])["LATENT"]
    images = []
    rows = (("compiled", OURS, model, vae), ("stock", STOCK, loader["MODEL"], loader["VAE"]))
    for row, (title, color, its_model, its_vae) in enumerate(rows):
        group = graph.group(f"The {title} picture", (COLUMN * 2, row * TOUR_ROW), color, rightward=True)
        sampled = _sampler(graph, group, its_model, prompts, latent, cfg=7.0, seed=seed)
        image = graph.add(group, "VAEDecode", wide=240, samples=sampled["LATENT"], vae=its_vae)["IMAGE"]
        graph.add(group, "SaveImage", wide=340, images=image, filename_prefix=f"{graph.name}_{title}")
        images.append(image)
    group = graph.group("How far apart", (COLUMN * 2, 2 * TOUR_ROW), OURS, rightward=True)
    compared = graph.add(group, "ResoluteCompareImages", image_a=images[0], image_b=images[1])
    graph.add(group, "PreviewImage", title="Heat map", wide=340, images=compared["heat_map"])
    graph.add(group, "PreviewAny", title="Report", wide=560, source=compared["text"])
    graph.note(NOTES[graph.name], (0, 1020), 680, 150)
    return graph


def _text_to_image(name: str, checkpoint: str, preset: str, width: int, height: int, cfg: float) -> Graph:
    graph = Graph(name)
    model, clip, vae, _ = _compiled_checkpoint(graph, checkpoint)
    prompts = _prompts(graph, clip, (COLUMN, 320))
    group = graph.group("Size", (0, 740), STOCK, rightward=True)
    size = _resolution(graph, group, preset, width, height)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])
    group = graph.group("Sample", (COLUMN * 2, 0), STOCK)
    sampler = _sampler(graph, group, model, prompts, latent["LATENT"], cfg=cfg, after="randomize")
    _decode(graph, sampler, vae, (COLUMN * 3, 0))
    graph.note(NOTES[graph.name], (COLUMN * 2, 430), 600, 130)
    return graph


def _compiled_checkpoint(graph: Graph, checkpoint: str) -> tuple[Output, Output, Output, Node]:
    """Compiled model, CLIP, VAE with compiled decoding, and the loader itself."""
    group = graph.group("Checkpoint", (0, 0), STOCK)
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=checkpoint)
    group = graph.group("Compiled", (COLUMN, 0), OURS)
    model = graph.add(group, "ResoluteCompileModel", model=loader["MODEL"])
    vae = graph.add(group, "ResoluteCompileVAEDecode", vae=loader["VAE"])
    return model["MODEL"], loader["CLIP"], vae["VAE"], loader


def _prompts(graph: Graph, clip: Output, at: tuple[int, int], wide: int = 300) -> Prompts:
    group = graph.group("Prompt", at, STOCK)
    texts = (("Positive prompt", POSITIVE), ("Negative prompt", NEGATIVE))
    positive, negative = (
        graph.add(group, "CLIPTextEncode", title=title, wide=wide, clip=clip, text=text) for title, text in texts
    )
    return positive["CONDITIONING"], negative["CONDITIONING"]


def _decode(graph: Graph, sampler: Node, vae: Output, at: tuple[int, int]) -> None:
    group = graph.group("Result", at, STOCK, rightward=True)
    image = graph.add(group, "VAEDecode", wide=240, samples=sampler["LATENT"], vae=vae)["IMAGE"]
    graph.add(group, "SaveImage", wide=340, images=image, filename_prefix=graph.name)


def _resolution(graph: Graph, group: Group, preset: str, width: int, height: int) -> Node:
    return graph.add(group, "ResoluteResolution", preset=preset, width=width, height=height)


def _sampler(
    graph: Graph,
    group: Group,
    model: Output,
    prompts: Prompts,
    latent: Output,
    *,
    cfg: float,
    denoise: float = 1.0,
    after: str = "fixed",
    seed: int | Output = 1,
) -> Node:
    return graph.add(
        group,
        "KSampler",
        model=model,
        positive=prompts[0],
        negative=prompts[1],
        latent_image=latent,
        seed=seed,
        control_after_generate=after,
        steps=20,
        cfg=cfg,
        denoise=denoise,
    )


def _tour_stop(graph: Graph, loader: Node, prompts: Prompts, row: int, strip: Output | None) -> Output:
    """One row: size, latent, sampler, decoder, file. Returns the strip with its image added."""
    title, preset, width, height = TOUR[row]
    group = graph.group(title, (COLUMN, row * TOUR_ROW), STOCK, rightward=True)
    size = _resolution(graph, group, preset, width, height)
    latent = graph.add(group, "EmptyLatentImage", width=size["width"], height=size["height"])
    sampled = _sampler(graph, group, loader["MODEL"], prompts, latent["LATENT"], cfg=7.0)
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
    resolution_tour,
    image_to_image,
    compare_with_stock,
)


def rendered() -> dict[str, str]:
    """What belongs on disk: path below ``workflows/`` -> text of the file."""
    texts: dict[str, str] = {}
    for build in WORKFLOWS:
        graph = build()
        texts[f"{graph.name}.json"] = _text(graph.ui())
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
    """The command line; exits with 1 when ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    if parser.parse_args(arguments).check:
        names = differing()
        for name in names:
            print(f"workflows/{name} differs: run python -m scripts.support.build_workflows")
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
