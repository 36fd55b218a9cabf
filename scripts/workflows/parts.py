"""Parts that several bundled workflows share: loader, prompts, size, sampler, result."""

from __future__ import annotations

from .graph import Graph, Group, Node, Output

POSITIVE = "a lighthouse on a cliff at dusk, waves, warm light in the windows, detailed painting"
NEGATIVE = "blurry, low quality, text, watermark"
# Colours of frames around Resolute's nodes and around ComfyUI's.
OURS, STOCK = "#2f7f86", "#3f789e"
# Distance between columns in pixels.
COLUMN = 380
Prompts = tuple[Output, Output]  # positive, negative


def compiled_checkpoint(
    graph: Graph, checkpoint: str, with_deepcache: bool = False, backend: str = "auto"
) -> tuple[Output, Output, Output, Node]:
    """Returns compiled model, CLIP, VAE with compiled decoding, and the loader node. The last group is "Compiled"."""
    group = graph.group("Checkpoint", (0, 0), STOCK)
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=checkpoint)
    group = graph.group("Compiled", (COLUMN, 0), OURS)
    link = loader["MODEL"]
    if with_deepcache:
        link = graph.add(group, "ResoluteDeepCache", model=link)["MODEL"]
    model = graph.add(group, "ResoluteCompileModel", model=link, backend=backend)
    vae = graph.add(group, "ResoluteCompileVAEDecode", vae=loader["VAE"], backend=backend)
    return model["MODEL"], loader["CLIP"], vae["VAE"], loader


def prompts(graph: Graph, clip: Output, at: tuple[int, int], wide: int = 300) -> Prompts:
    group = graph.group("Prompt", at, STOCK)
    texts = (("Positive prompt", POSITIVE), ("Negative prompt", NEGATIVE))
    positive, negative = (
        graph.add(group, "CLIPTextEncode", title=title, wide=wide, clip=clip, text=text) for title, text in texts
    )
    return positive["CONDITIONING"], negative["CONDITIONING"]


def decode(graph: Graph, sampler: Node, vae: Output, at: tuple[int, int]) -> None:
    group = graph.group("Result", at, STOCK, rightward=True)
    image = graph.add(group, "VAEDecode", wide=240, samples=sampler["LATENT"], vae=vae)["IMAGE"]
    graph.add(group, "SaveImage", wide=340, images=image, filename_prefix=graph.name)


def resolution(graph: Graph, group: Group, preset: str, width: int, height: int) -> Node:
    return graph.add(group, "ResoluteResolution", preset=preset, width=width, height=height)


def scaled_picture(graph: Graph, group: Group, size: Node) -> Output:
    """An image that the user chooses, scaled to the size of a Resolution node."""
    return scaled(graph, group, graph.add(group, "LoadImage")["IMAGE"], size)


def scaled(graph: Graph, group: Group, picture: Output, size: Node) -> Output:
    """An image scaled to the size of a Resolution node."""
    node = graph.add(
        group,
        "ImageScale",
        image=picture,
        upscale_method="lanczos",
        width=size["width"],
        height=size["height"],
        crop="center",
    )
    return node["IMAGE"]


def sampler(
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
    steps: int = 20,
    sampler_name: str = "euler",
    scheduler: str = "normal",
) -> Node:
    """A KSampler with its two prompts."""
    return graph.add(
        group,
        "KSampler",
        model=model,
        positive=prompts[0],
        negative=prompts[1],
        latent_image=latent,
        seed=seed,
        control_after_generate=after,
        steps=steps,
        cfg=cfg,
        denoise=denoise,
        sampler_name=sampler_name,
        scheduler=scheduler,
    )
