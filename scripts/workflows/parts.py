"""Parts that several bundled workflows share: loader, prompts, size, sampler, result."""

from __future__ import annotations

from .graph import OURS, Graph, Group, Node, Output
from .node_types import WidgetValue

POSITIVE = "a lighthouse on a cliff at dusk, waves, warm light in the windows, detailed painting"
NEGATIVE = "blurry, low quality, text, watermark"
Prompts = tuple[Output, Output]  # positive, negative
Pixels = tuple[str, int, int]  # preset of Resolution, width, height


def compiled_checkpoint(
    graph: Graph, checkpoint: str, with_deepcache: bool = False, backend: str = "auto", encodes: bool = False
) -> tuple[Output, Output, Output, Node]:
    """Returns compiled model, CLIP, compiled VAE, and the loader node."""
    loader = graph.add(graph.group("Checkpoint"), "CheckpointLoaderSimple", ckpt_name=checkpoint)
    model, vae = compiled(graph, loader["MODEL"], loader["VAE"], with_deepcache, backend, encodes)
    return model, loader["CLIP"], vae, loader


def compiled(
    graph: Graph,
    model: Output,
    vae: Output,
    with_deepcache: bool = False,
    backend: str = "auto",
    encodes: bool = False,
) -> tuple[Output, Output]:
    """Compiled model and VAE. encodes: the workflow also encodes with the VAE."""
    group = graph.group("Compiled", OURS)
    if with_deepcache:
        model = graph.add(group, "ResoluteDeepCache", model=model)["MODEL"]
    model = graph.add(group, "ResoluteCompileModel", model=model, backend=backend)["MODEL"]
    return model, graph.add(
        group, "ResoluteCompileVAE" if encodes else "ResoluteCompileVAEDecode", vae=vae, backend=backend
    )["VAE"]


def models(graph: Graph, unet: str, vae: str) -> tuple[Output, Output]:
    """The loaded diffusion model and VAE, in a frame of the loaders."""
    group = graph.group("Models")
    loaded = graph.add(group, "UNETLoader", unet_name=unet)["MODEL"]
    return loaded, graph.add(group, "VAELoader", vae_name=vae)["VAE"]


def video(graph: Graph, images: Output, fps: float, audio: Output | None = None) -> None:
    """A file of a video, in the frame of the decoder."""
    group, sound = graph.groups[-1], {} if audio is None else {"audio": audio}
    made = graph.add(group, "CreateVideo", images=images, fps=fps, **sound)["VIDEO"]
    graph.add(group, "SaveVideo", video=made, filename_prefix=f"video/{graph.name}")


def prompts(graph: Graph, clip: Output, zeroed: bool = False) -> Prompts:
    """zeroed: the negative prompt is the positive one with zeros, which a distilled model never reads."""
    group = graph.group("Prompt")
    positive = graph.add(group, "CLIPTextEncode", "Positive prompt", clip=clip, text=POSITIVE)["CONDITIONING"]
    if zeroed:
        return positive, graph.add(group, "ConditioningZeroOut", conditioning=positive)["CONDITIONING"]
    negative = graph.add(group, "CLIPTextEncode", "Negative prompt", clip=clip, text=NEGATIVE)
    return positive, negative["CONDITIONING"]


def resolution(graph: Graph, group: Group, pixels: Pixels) -> dict[str, Output]:
    """Width and height, as inputs of another node."""
    preset, width, height = pixels
    node = graph.add(group, "ResoluteResolution", preset=preset, width=width, height=height)
    return {"width": node["width"], "height": node["height"]}


def latent(
    graph: Graph, group: Group, pixels: Pixels, kind: str = "EmptyLatentImage", **inputs: WidgetValue | Output
) -> Output:
    """An empty latent of the size of a Resolution node."""
    return graph.add(group, kind, **inputs, **resolution(graph, group, pixels))["LATENT"]


def scaled(graph: Graph, group: Group, picture: Output, size: dict[str, Output]) -> Output:
    """An image scaled to a size."""
    return graph.add(group, "ImageScale", image=picture, upscale_method="lanczos", crop="center", **size)["IMAGE"]


def sampled(
    graph: Graph, group: Group, model: Output, texts: Prompts, start: Output, **settings: WidgetValue | Output
) -> Output:
    """The latent of a KSampler. settings: of its widgets, where they are not its defaults."""
    links = {"model": model, "positive": texts[0], "negative": texts[1], "latent_image": start}
    return graph.add(group, "KSampler", **links, **{"seed": 1, **settings})["LATENT"]


def drawn(
    graph: Graph, model: Output, texts: Prompts, start: Output, vae: Output, **settings: WidgetValue | Output
) -> None:
    """Sampler, decoder and file, in frames of their own. The sampler takes another seed after each prompt."""
    settings = {"control_after_generate": "randomize", **settings}
    latents = sampled(graph, graph.group("Sample"), model, texts, start, **settings)
    group = graph.group("Result")
    image = graph.add(group, "VAEDecode", samples=latents, vae=vae)["IMAGE"]
    graph.add(group, "SaveImage", images=image, filename_prefix=graph.name)
