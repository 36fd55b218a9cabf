"""Workflows with transformers: ComfyUI's own templates of these models, with Resolute's two nodes added."""

from __future__ import annotations

from collections.abc import Callable

from . import models as files
from . import parts
from .graph import Graph, Output
from .node_types import WidgetValue
from .videos_and_edits import VIDEOS_AND_EDITS

_IMAGE_NOTE = """## {title}, compiled
1. The loaders name the model files of ComfyUI's own template; the front end offers to download what is missing.
2. Press **Run**. The first run compiles, and the node shows its progress.
3. Change the size in **Resolution** and run again: nothing compiles, at any size.

The cyan nodes are the only ones added to ComfyUI's own graph."""
_VAE_NOTE = """
**Compile VAE Decode** does not know this decoder: it leaves the VAE as it is, and says so."""
_FORMAT_NOTE = """

The node says what multiplies the weights: *int8_tensorwise products* on RTX 20 and later. On H100 and H200 int8 is
no faster than bf16. Which file suits which card: docs/formats.md."""


def flux_dev_text_to_image() -> Graph:
    """Text to image with FLUX.1 dev."""
    graph = Graph("flux_dev_text_to_image")
    unet, vae = parts.models(graph, files.FLUX_DEV, files.FLUX_VAE)
    clip = graph.add(
        graph.groups[0], "DualCLIPLoader", clip_name1=files.CLIP_L, clip_name2=files.T5, type="flux"
    )["CLIP"]  # fmt: skip
    _text_to_image(graph, (unet, vae), clip, 1024, zeroed=True, cfg=1.0)
    graph.note(_IMAGE_NOTE.format(title="FLUX.1 dev"))
    return graph


def z_image_turbo_text_to_image() -> Graph:
    """Text to image with Z-Image Turbo, in eight steps."""
    graph = Graph("z_image_turbo_text_to_image")
    _z_image(graph, files.Z_IMAGE_TURBO, files.QWEN_3)
    graph.note(_IMAGE_NOTE.format(title="Z-Image Turbo"))
    return graph


def z_image_turbo_int8_text_to_image() -> Graph:
    """Text to image with Z-Image Turbo in int8: half the memory, and products in int8 from RTX 20 on."""
    graph = Graph("z_image_turbo_int8_text_to_image")
    _z_image(graph, files.Z_IMAGE_TURBO_INT8, files.QWEN_3_FP8)
    graph.note(_IMAGE_NOTE.format(title="Z-Image Turbo in int8") + _FORMAT_NOTE)
    return graph


def qwen_image_text_to_image() -> Graph:
    """Text to image with Qwen-Image."""
    graph = Graph("qwen_image_text_to_image")
    unet, vae = parts.models(graph, files.QWEN_IMAGE, files.QWEN_IMAGE_VAE)
    clip = graph.add(graph.groups[0], "CLIPLoader", clip_name=files.QWEN_25, type="qwen_image")["CLIP"]
    _text_to_image(graph, (unet, vae), clip, 1328, shift=3.1, cfg=4.0)
    graph.note(_IMAGE_NOTE.format(title="Qwen-Image"))
    return graph


def wan22_text_to_video() -> Graph:
    """Text to video with Wan 2.2's model of 5 billion weights."""
    graph = Graph("wan22_text_to_video")
    unet, vae = parts.models(graph, files.WAN22, files.WAN22_VAE)
    clip = graph.add(graph.groups[0], "CLIPLoader", clip_name=files.UMT5, type="wan")["CLIP"]
    shifted = graph.add(graph.groups[0], "ModelSamplingSD3", model=unet, shift=8.0)["MODEL"]
    model, compiled = parts.compiled(graph, shifted, vae)
    texts = parts.prompts(graph, clip)
    pixels = ("custom", 1280, 704)
    latent = parts.latent(graph, graph.group("Size"), pixels, "Wan22ImageToVideoLatent", vae=vae, length=121)
    sampled = parts.sampled(
        graph, graph.group("Sample"), model, texts, latent,
        cfg=5.0, sampler_name="uni_pc", scheduler="simple", control_after_generate="randomize",
    )  # fmt: skip
    _decoded_video(graph, sampled, compiled)
    graph.note(_IMAGE_NOTE.format(title="Wan 2.2"))
    return graph


def ltx_text_to_video() -> Graph:
    """Text to video with LTX-Video."""
    graph = Graph("ltx_text_to_video")
    group = graph.group("Models")
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=files.LTX)
    clip = graph.add(group, "CLIPLoader", clip_name=files.T5, type="ltxv")["CLIP"]
    model, vae = parts.compiled(graph, loader["MODEL"], loader["VAE"])
    texts = parts.prompts(graph, clip)
    prompts = graph.add(graph.groups[-1], "LTXVConditioning", positive=texts[0], negative=texts[1])
    latent = parts.latent(graph, graph.group("Size"), ("custom", 768, 512), "EmptyLTXVLatentVideo", length=97)
    group = graph.group("Sample")
    sigmas = graph.add(group, "LTXVScheduler", latent=latent, steps=30)["SIGMAS"]
    chosen = graph.add(group, "KSamplerSelect", sampler_name="euler")["SAMPLER"]
    sampler = graph.add(
        group, "SamplerCustom", model=model, positive=prompts["positive"], negative=prompts["negative"],
        sampler=chosen, sigmas=sigmas, latent_image=latent, noise_seed=1, control_after_generate="randomize", cfg=3.0,
    )  # fmt: skip
    _decoded_video(graph, sampler["output"], vae)
    graph.note(_IMAGE_NOTE.format(title="LTX-Video") + _VAE_NOTE)
    return graph


def _z_image(graph: Graph, model: str, text_encoder: str) -> None:
    unet, vae = parts.models(graph, model, files.FLUX_VAE)
    clip = graph.add(graph.groups[0], "CLIPLoader", clip_name=text_encoder, type="lumina2")["CLIP"]
    _text_to_image(
        graph, (unet, vae), clip, 1024, zeroed=True, shift=3.0, cfg=1.0, steps=8, sampler_name="res_multistep"
    )


def _text_to_image(
    graph: Graph,
    loaded: tuple[Output, Output],
    clip: Output,
    side: int,
    zeroed: bool = False,
    shift: float = 0.0,
    **settings: WidgetValue,
) -> None:
    """loaded: model and VAE."""
    model, vae = loaded
    if shift:
        model = graph.add(graph.groups[0], "ModelSamplingAuraFlow", model=model, shift=shift)["MODEL"]
    model, vae = parts.compiled(graph, model, vae)
    texts = parts.prompts(graph, clip, zeroed)
    latent = parts.latent(graph, graph.group("Size"), ("custom", side, side), "EmptySD3LatentImage")
    parts.drawn(graph, model, texts, latent, vae, scheduler="simple", **settings)


def _decoded_video(graph: Graph, latent: Output, vae: Output) -> None:
    group = graph.group("Result")
    parts.video(graph, graph.add(group, "VAEDecode", samples=latent, vae=vae)["IMAGE"], 24.0)


FAMILY_WORKFLOWS: tuple[Callable[[], Graph], ...] = (
    flux_dev_text_to_image,
    z_image_turbo_text_to_image,
    z_image_turbo_int8_text_to_image,
    qwen_image_text_to_image,
    wan22_text_to_video,
    ltx_text_to_video,
    *VIDEOS_AND_EDITS,
)
