"""Workflows with transformers: ComfyUI's own templates of these models, with Resolute's two nodes added."""

from __future__ import annotations

from collections.abc import Callable

from . import parts
from .graph import Graph, Node, Output
from .models import (
    CLIP_L,
    FLUX_DEV,
    FLUX_VAE,
    LTX,
    QWEN_3,
    QWEN_25,
    QWEN_IMAGE,
    QWEN_IMAGE_VAE,
    T5,
    UMT5,
    WAN22,
    WAN22_VAE,
    Z_IMAGE_TURBO,
)
from .parts import COLUMN, NEGATIVE, OURS, POSITIVE, STOCK, Prompts

_IMAGE_NOTE = """## {title}, compiled
1. The loaders name the model files of ComfyUI's own template; the front end offers to download what is missing.
2. Press **Run**. The first run compiles, and the node shows its progress.
3. Change the size in **Resolution** and run again: nothing compiles, at any size.

The cyan nodes are the only ones added to ComfyUI's own graph."""
_VAE_NOTE = """
**Compile VAE Decode** does not know this decoder: it leaves the VAE as it is, and says so."""


def flux_dev_text_to_image() -> Graph:
    """Text to image with FLUX.1 dev."""
    graph = Graph("flux_dev_text_to_image")
    unet = _models(graph, FLUX_DEV, FLUX_VAE)
    clip = graph.add(graph.groups[0], "DualCLIPLoader", clip_name1=CLIP_L, clip_name2=T5, type="flux")["CLIP"]
    _text_to_image(graph, unet, clip, "FLUX.1 dev", (1024, 1024), zeroed=True, cfg=1.0, scheduler="simple")
    return graph


def z_image_turbo_text_to_image() -> Graph:
    """Text to image with Z-Image Turbo, in eight steps."""
    graph = Graph("z_image_turbo_text_to_image")
    unet = _models(graph, Z_IMAGE_TURBO, FLUX_VAE)
    clip = graph.add(graph.groups[0], "CLIPLoader", clip_name=QWEN_3, type="lumina2")["CLIP"]
    _text_to_image(
        graph, unet, clip, "Z-Image Turbo", (1024, 1024), zeroed=True, shift=3.0, cfg=1.0, steps=8,
        sampler_name="res_multistep", scheduler="simple",
    )  # fmt: skip
    return graph


def qwen_image_text_to_image() -> Graph:
    """Text to image with Qwen-Image."""
    graph = Graph("qwen_image_text_to_image")
    unet = _models(graph, QWEN_IMAGE, QWEN_IMAGE_VAE)
    clip = graph.add(graph.groups[0], "CLIPLoader", clip_name=QWEN_25, type="qwen_image")["CLIP"]
    _text_to_image(
        graph, unet, clip, "Qwen-Image", (1328, 1328), shift=3.1, cfg=4.0, scheduler="simple", note=_VAE_NOTE
    )
    return graph


def wan22_text_to_video() -> Graph:
    """Text to video with Wan 2.2's model of 5 billion weights."""
    graph = Graph("wan22_text_to_video")
    unet = _models(graph, WAN22, WAN22_VAE)
    vae = graph.nodes[-1]["VAE"]
    clip = graph.add(graph.groups[0], "CLIPLoader", clip_name=UMT5, type="wan")["CLIP"]
    shifted = graph.add(graph.groups[0], "ModelSamplingSD3", model=unet["MODEL"], shift=8.0)["MODEL"]
    model, compiled = _compiled(graph, shifted, vae)
    prompts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    group = graph.group("Size", (0, _lowest(graph)), STOCK, rightward=True)
    size = parts.resolution(graph, group, "custom", 1280, 704)
    latent = graph.add(
        group, "Wan22ImageToVideoLatent", vae=vae, width=size["width"], height=size["height"], length=121
    )["LATENT"]
    group = graph.group("Sample", (COLUMN * 2, 0), STOCK)
    sampler = parts.sampler(
        graph, group, model, prompts, latent, cfg=5.0, sampler_name="uni_pc", scheduler="simple", after="randomize"
    )
    _video(graph, sampler["LATENT"], compiled, 24.0)
    _note(graph, "Wan 2.2", _VAE_NOTE)
    return graph


def ltx_text_to_video() -> Graph:
    """Text to video with LTX-Video."""
    graph = Graph("ltx_text_to_video")
    group = graph.group("Models", (0, 0), STOCK)
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=LTX)
    clip = graph.add(group, "CLIPLoader", clip_name=T5, type="ltxv")["CLIP"]
    model, vae = _compiled(graph, loader["MODEL"], loader["VAE"])
    texts = parts.prompts(graph, clip, (COLUMN, graph.groups[-1].below))
    prompts = graph.add(graph.groups[-1], "LTXVConditioning", positive=texts[0], negative=texts[1])
    group = graph.group("Size", (0, _lowest(graph)), STOCK, rightward=True)
    size = parts.resolution(graph, group, "custom", 768, 512)
    latent = graph.add(group, "EmptyLTXVLatentVideo", width=size["width"], height=size["height"], length=97)["LATENT"]
    group = graph.group("Sample", (COLUMN * 2, 0), STOCK)
    sigmas = graph.add(group, "LTXVScheduler", latent=latent, steps=30)["SIGMAS"]
    chosen = graph.add(group, "KSamplerSelect", sampler_name="euler")["SAMPLER"]
    sampler = graph.add(
        group, "SamplerCustom", model=model, positive=prompts["positive"], negative=prompts["negative"],
        sampler=chosen, sigmas=sigmas, latent_image=latent, noise_seed=1, control_after_generate="randomize", cfg=3.0,
    )  # fmt: skip
    _video(graph, sampler["output"], vae, 24.0)
    _note(graph, "LTX-Video", _VAE_NOTE)
    return graph


def _models(graph: Graph, unet: str, vae: str) -> Node:
    """The loaders of a diffusion model and a VAE; the VAE's is the last node."""
    group = graph.group("Models", (0, 0), STOCK)
    loaded = graph.add(group, "UNETLoader", unet_name=unet)
    graph.add(group, "VAELoader", vae_name=vae)
    return loaded


def _compiled(graph: Graph, model: Output, vae: Output) -> tuple[Output, Output]:
    group = graph.group("Compiled", (COLUMN, 0), OURS)
    compiled = graph.add(group, "ResoluteCompileModel", model=model)["MODEL"]
    return compiled, graph.add(group, "ResoluteCompileVAEDecode", vae=vae)["VAE"]


def _text_to_image(
    graph: Graph,
    unet: Node,
    clip: Output,
    title: str,
    pixels: tuple[int, int],
    *,
    cfg: float,
    scheduler: str,
    zeroed: bool = False,
    shift: float = 0.0,
    steps: int = 20,
    sampler_name: str = "euler",
    note: str = "",
) -> None:
    """zeroed: the negative prompt is the positive one with zeros, which a distilled model never reads."""
    model = unet["MODEL"]
    if shift:
        model = graph.add(graph.groups[0], "ModelSamplingAuraFlow", model=model, shift=shift)["MODEL"]
    model, vae = _compiled(graph, model, graph.nodes[1]["VAE"])
    prompts = _prompts(graph, clip, zeroed)
    group = graph.group("Size", (0, _lowest(graph)), STOCK, rightward=True)
    size = parts.resolution(graph, group, "custom", *pixels)
    latent = graph.add(group, "EmptySD3LatentImage", width=size["width"], height=size["height"])["LATENT"]
    group = graph.group("Sample", (COLUMN * 2, 0), STOCK)
    sampler = parts.sampler(
        graph, group, model, prompts, latent, cfg=cfg, steps=steps, sampler_name=sampler_name, scheduler=scheduler,
        after="randomize",
    )  # fmt: skip
    parts.decode(graph, sampler, vae, (COLUMN * 3, 0))
    _note(graph, title, note)


def _prompts(graph: Graph, clip: Output, zeroed: bool) -> Prompts:
    group = graph.group("Prompt", (COLUMN, graph.groups[-1].below), STOCK)
    positive = graph.add(group, "CLIPTextEncode", title="Positive prompt", clip=clip, text=POSITIVE)["CONDITIONING"]
    if zeroed:
        return positive, graph.add(group, "ConditioningZeroOut", conditioning=positive)["CONDITIONING"]
    negative = graph.add(group, "CLIPTextEncode", title="Negative prompt", clip=clip, text=NEGATIVE)
    return positive, negative["CONDITIONING"]


def _video(graph: Graph, latent: Output, vae: Output, fps: float) -> None:
    group = graph.group("Result", (COLUMN * 3, 0), STOCK)
    images = graph.add(group, "VAEDecode", samples=latent, vae=vae)["IMAGE"]
    video = graph.add(group, "CreateVideo", images=images, fps=fps)["VIDEO"]
    graph.add(group, "SaveVideo", video=video, filename_prefix=f"video/{graph.name}")


def _lowest(graph: Graph) -> int:
    return max(group.below for group in graph.groups)


def _note(graph: Graph, title: str, more: str) -> None:
    sample = next(group for group in graph.groups if group.title == "Sample")
    graph.note(_IMAGE_NOTE.format(title=title) + more, (COLUMN * 2, max(sample.below, _lowest(graph) - 300)), 600, 170)


FAMILY_WORKFLOWS: tuple[Callable[[], Graph], ...] = (
    flux_dev_text_to_image,
    z_image_turbo_text_to_image,
    qwen_image_text_to_image,
    wan22_text_to_video,
    ltx_text_to_video,
)
