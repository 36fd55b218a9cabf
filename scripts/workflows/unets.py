"""The bundled workflows with UNets."""

from __future__ import annotations

from collections.abc import Callable

from . import parts
from .graph import OURS, STOCK, Graph, Output
from .models import CONTROL_NET, LCM_LORA, SD15, SDXL
from .notes import NOTES

SD15_PIXELS, SDXL_PIXELS = ("SD1.5 512x512", 512, 512), ("SDXL 1024x1024", 1024, 1024)
LCM_PIXELS = (SDXL_PIXELS, ("custom", 512, 2048), ("custom", 2048, 512))
# Title, preset, width and height of each size of the tour; the last has an odd latent, 73 x 57.
TOUR = (
    ("960 x 720", "960x720", 960, 720),
    ("896 x 768", "896x768", 896, 768),
    ("720 x 720", "720x720", 720, 720),
    ("640 x 960, portrait", "640x960", 640, 960),
    ("584 x 456, odd latent", "custom", 584, 456),
)


def sd15_text_to_image() -> Graph:
    """Stock text to image with Compile Model and Compile VAE Decode."""
    return _text_to_image("sd15_text_to_image", SD15, SD15_PIXELS, cfg=7.0)


def sdxl_text_to_image() -> Graph:
    """Text to image with SDXL."""
    return _text_to_image("sdxl_text_to_image", SDXL, SDXL_PIXELS, cfg=6.0)


def oneflow_text_to_image() -> Graph:
    """Text to image with SD1.5 and the backend `oneflow`, which `auto` never chooses."""
    return _text_to_image("oneflow_text_to_image", SD15, SD15_PIXELS, cfg=7.0, backend="oneflow")


def deepcache() -> Graph:
    """Text to image with DeepCache before Compile Model."""
    return _text_to_image("deepcache", SD15, SD15_PIXELS, cfg=7.0, with_deepcache=True)


def _text_to_image(
    name: str, checkpoint: str, pixels: parts.Pixels, *, cfg: float, with_deepcache: bool = False, backend: str = "auto"
) -> Graph:
    graph = Graph(name)
    model, clip, vae, _ = parts.compiled_checkpoint(graph, checkpoint, with_deepcache, backend)
    texts = parts.prompts(graph, clip)
    latent = parts.latent(graph, graph.group("Size"), pixels)
    parts.drawn(graph, model, texts, latent, vae, cfg=cfg)
    graph.note(NOTES[graph.name])
    return graph


def resolution_tour() -> Graph:
    """One compiled checkpoint, five sizes and the cache report."""
    graph = Graph("resolution_tour")
    loader = graph.add(graph.group("Checkpoint, compiled", OURS), "ResoluteLoadCheckpoint", ckpt_name=SD15)
    texts = parts.prompts(graph, loader["CLIP"])
    pictures: list[Output] = []
    for column, (title, preset, width, height) in zip((2, 3, 3, 3, 3), TOUR, strict=True):
        group = graph.group(title, column=column)
        latent = parts.latent(graph, group, (preset, width, height))
        latent = parts.sampled(graph, group, loader["MODEL"], texts, latent, cfg=7.0)
        image = graph.add(group, "VAEDecode", samples=latent, vae=loader["VAE"])["IMAGE"]
        graph.add(group, "SaveImage", images=image, filename_prefix=f"{graph.name}_{width}x{height}")
        if pictures:
            graph.collapse(group, "ResoluteResolution", "KSampler")  # the frame's title names the size
        graph.collapse(group, "EmptyLatentImage", "VAEDecode", "SaveImage")
        pictures.append(image)
    group = graph.group("Side by side", column=4)
    strip, *others = pictures
    for image in others:
        strip = graph.add(group, "ImageStitch", image1=strip, image2=image, spacing_width=8)["IMAGE"]
    graph.collapse(group, "ImageStitch")
    graph.add(group, "PreviewImage", "The five pictures", images=strip)
    group = graph.group("What it cost", OURS, column=5)
    # The report's input is the finished strip, so it runs after all sizes.
    report = graph.add(group, "ResoluteReport", any=strip)
    graph.add(group, "PreviewImage", images=report["image"])
    graph.note(NOTES[graph.name])
    return graph


def image_to_image() -> Graph:
    """Image to image from ComfyUI's example image, scaled to a valid size."""
    graph = Graph("image_to_image")
    model, clip, vae, _ = parts.compiled_checkpoint(graph, SD15, encodes=True)
    texts = parts.prompts(graph, clip)
    picture = graph.add(graph.group("Picture"), "LoadImage")["IMAGE"]
    group = graph.group("Scaled to a valid size")
    picture = parts.scaled(graph, group, picture, parts.resolution(graph, group, SD15_PIXELS))
    latent = graph.add(group, "VAEEncode", pixels=picture, vae=vae)["LATENT"]
    parts.drawn(graph, model, texts, latent, vae, cfg=7.0, denoise=0.6)
    graph.note(NOTES[graph.name])
    return graph


def compare_with_stock() -> Graph:
    """One checkpoint, sampled and decoded twice with the same seed: compiled and with stock ComfyUI."""
    graph = Graph("compare_with_stock")
    model, clip, vae, loader = parts.compiled_checkpoint(graph, SD15)
    texts = parts.prompts(graph, clip)
    seed = graph.add(graph.group("Seed"), "PrimitiveInt", "Seed of both", value=1)["INT"]
    latent = parts.latent(graph, graph.group("Size"), SD15_PIXELS)
    images = []
    rows = (("compiled", OURS, model, vae), ("stock", STOCK, loader["MODEL"], loader["VAE"]))
    for title, color, its_model, its_vae in rows:
        group = graph.group(f"The {title} picture", color)
        sampled = parts.sampled(graph, group, its_model, texts, latent, cfg=7.0, seed=seed)
        images.append(graph.add(group, "VAEDecode", samples=sampled, vae=its_vae)["IMAGE"])
        graph.add(group, "SaveImage", images=images[-1], filename_prefix=f"{graph.name}_{title}")
        graph.collapse(group, "VAEDecode")
    group = graph.group("How far apart", OURS)
    compared = graph.add(group, "ResoluteCompareImages", image_a=images[0], image_b=images[1])
    graph.add(group, "PreviewImage", "Heat map", images=compared["heat_map"])
    graph.note(NOTES[graph.name])
    return graph


def deepcache_controlnet() -> Graph:
    """DeepCache with a compiled ControlNet for the edges of an image."""
    graph = Graph("deepcache_controlnet")
    model, clip, vae, _ = parts.compiled_checkpoint(graph, SD15, with_deepcache=True)
    texts = parts.prompts(graph, clip)
    group, edged = graph.group("Size"), graph.group("Edges of a picture")
    size = parts.resolution(graph, group, SD15_PIXELS)
    picture = parts.scaled(graph, edged, graph.add(edged, "LoadImage")["IMAGE"], size)
    edges = graph.add(edged, "Canny", image=picture)["IMAGE"]
    latent = graph.add(group, "EmptyLatentImage", **size)["LATENT"]
    graph.collapse(group, "EmptyLatentImage")
    graph.collapse(edged, "ImageScale")
    group = graph.group("ControlNet", OURS)
    loaded = graph.add(group, "ControlNetLoader", control_net_name=CONTROL_NET)
    net = graph.add(group, "ResoluteCompileControlNet", control_net=loaded["CONTROL_NET"])["CONTROL_NET"]
    applied = graph.add(
        group, "ControlNetApplyAdvanced", positive=texts[0], negative=texts[1], control_net=net, image=edges,
        strength=0.8, end_percent=0.8,
    )  # fmt: skip
    parts.drawn(graph, model, (applied["positive"], applied["negative"]), latent, vae, cfg=7.0)
    graph.note(NOTES[graph.name])
    return graph


def lcm_image_to_image() -> Graph:
    """Image to image in three shapes with SDXL and LCM; DeepCache reports why it skips nothing."""
    graph = Graph("lcm_image_to_image")
    group = graph.group("SDXL with LCM")
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=SDXL)
    lora = graph.add(group, "LoraLoaderModelOnly", model=loader["MODEL"], lora_name=LCM_LORA)
    lcm = graph.add(group, "ModelSamplingDiscrete", model=lora["MODEL"], sampling="lcm")
    graph.collapse(group, "ModelSamplingDiscrete")
    model, vae = parts.compiled(graph, lcm["MODEL"], loader["VAE"], with_deepcache=True, encodes=True)
    texts = parts.prompts(graph, loader["CLIP"])
    picture = graph.add(graph.group("Picture"), "LoadImage")["IMAGE"]
    results = graph.group("Results", column=5)
    for pixels, column in zip(LCM_PIXELS, (3, 4, 4), strict=True):
        name = f"{pixels[1]}x{pixels[2]}"
        group = graph.group(name.replace("x", " x "), column=column)
        scaled = parts.scaled(graph, group, picture, parts.resolution(graph, group, pixels))
        latent = graph.add(group, "VAEEncode", pixels=scaled, vae=vae)["LATENT"]
        sampled = parts.sampled(
            graph, group, model, texts, latent,
            cfg=1.5, denoise=0.7, steps=6, sampler_name="lcm", scheduler="sgm_uniform",
        )  # fmt: skip
        image = graph.add(group, "VAEDecode", samples=sampled, vae=vae)["IMAGE"]
        graph.add(results, "SaveImage", images=image, filename_prefix=f"{graph.name}_{name}")
        if pixels is not LCM_PIXELS[0]:
            graph.collapse(group, "ResoluteResolution", "KSampler")  # the frame's title names the shape
        graph.collapse(group, "ImageScale", "VAEEncode", "VAEDecode")
    graph.note(NOTES[graph.name])
    return graph


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
