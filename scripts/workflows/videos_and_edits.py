"""Whole workflows of videos and of edited pictures: ComfyUI's own templates with Resolute's nodes added.

The templates' switches for a LoRA of few steps are left out, with what they switch to.
"""

from __future__ import annotations

from collections.abc import Callable

from . import models as files
from . import parts
from .graph import Graph, Group, Output
from .node_types import WidgetValue

# Nodes of LTX-2 with nothing to set.
_SMALL = (
    "LTXVConcatAVLatent", "LTXVSeparateAVLatent", "LTXVCropGuides", "LTXVAudioVAEDecode", "SamplerCustomAdvanced",
    "LTXVLatentUpsampler", "LTXVConditioning", "KSamplerSelect", "ManualSigmas", "LTXVEmptyLatentAudio", "CreateVideo",
)  # fmt: skip


def qwen_image_edit() -> Graph:
    """Edit a picture with Qwen-Image-Edit."""
    graph = Graph("qwen_image_edit")
    unet, vae = parts.models(graph, files.QWEN_IMAGE_EDIT, files.QWEN_IMAGE_VAE)
    group = graph.groups[0]
    clip = graph.add(group, "CLIPLoader", clip_name=files.QWEN_25, type="qwen_image")["CLIP"]
    shifted = graph.add(group, "ModelSamplingAuraFlow", model=unet, shift=3.0)["MODEL"]
    normed = graph.add(group, "CFGNorm", model=shifted)["MODEL"]
    model, vae = parts.compiled(graph, normed, vae, encodes=True)
    group = graph.group("Picture")
    picture = graph.add(group, "LoadImage")["IMAGE"]
    scaled = graph.add(group, "FluxKontextImageScale", image=picture)["IMAGE"]
    latent = graph.add(group, "VAEEncode", pixels=scaled, vae=vae)["LATENT"]
    group = graph.group("Prompt")
    texts = [
        graph.add(
            group, "TextEncodeQwenImageEditPlus", title, clip=clip, vae=vae, image1=scaled, prompt=text
        )["CONDITIONING"]
        for title, text in (("Prompt with the picture", "make it a snowy winter night"), ("Negative prompt", ""))
    ]  # fmt: skip
    parts.drawn(graph, model, (texts[0], texts[1]), latent, vae, cfg=4.0, scheduler="simple")
    graph.note("""## Qwen-Image-Edit, compiled
1. Choose a picture, write what is to change, and press **Run**. The first run compiles, and the nodes show it.
2. Another picture, of any size, compiles nothing. The VAE encodes it three times in each prompt, compiled too.
3. The text encoder (Qwen2.5-VL) stays ComfyUI's own: it reads the picture and the prompt once.""")
    return graph


def wan22_image_to_video() -> Graph:
    """Image to video with Wan 2.2's two models of 14 billion weights."""
    graph = Graph("wan22_image_to_video")
    group = graph.group("Models")
    vae = graph.add(group, "VAELoader", vae_name=files.WAN21_VAE)["VAE"]
    clip = graph.add(group, "CLIPLoader", clip_name=files.UMT5, type="wan")["CLIP"]
    shifted = []
    for name in (files.WAN22_HIGH, files.WAN22_LOW):
        loaded = graph.add(group, "UNETLoader", unet_name=name)["MODEL"]
        shifted.append(graph.add(group, "ModelSamplingSD3", model=loaded, shift=5.0)["MODEL"])
    graph.collapse(group, "ModelSamplingSD3")
    high, vae = parts.compiled(graph, shifted[0], vae, encodes=True)
    low = graph.add(graph.groups[-1], "ResoluteCompileModel", model=shifted[1])["MODEL"]
    texts = parts.prompts(graph, clip)
    group = graph.group("Picture")
    picture = graph.add(group, "LoadImage")["IMAGE"]
    group = graph.group("Size")
    start = graph.add(
        group, "WanImageToVideo", positive=texts[0], negative=texts[1], vae=vae, start_image=picture, length=81,
        **parts.resolution(graph, group, ("custom", 640, 640)),
    )  # fmt: skip
    group = graph.group("Sample")
    links = {"positive": start["positive"], "negative": start["negative"]}
    settings: dict[str, WidgetValue] = {"cfg": 3.5, "scheduler": "simple"}
    noisy = graph.add(
        group, "KSamplerAdvanced", "High noise", model=high, latent_image=start["latent"], noise_seed=1,
        control_after_generate="randomize", end_at_step=10, return_with_leftover_noise="enable", **links, **settings,
    )["LATENT"]  # fmt: skip
    latent = graph.add(
        group, "KSamplerAdvanced", "Low noise", model=low, latent_image=noisy, add_noise="disable", start_at_step=10,
        **links, **settings,
    )["LATENT"]  # fmt: skip
    _decoded(graph, latent, vae, 16.0)
    graph.collapse(graph.groups[-1], "VAEDecode", "CreateVideo")
    graph.note("""## Wan 2.2 with two models, compiled
1. Choose a picture, and press **Run**. The first run compiles, and the nodes show it.
2. Both models have the same blocks: the second one compiles nothing, nor does another size.
3. Blocks whose weights stream gain less. **Compile VAE** also encodes the picture.""")
    return graph


def hunyuan_video15_text_to_video() -> Graph:
    """Text to video with HunyuanVideo 1.5."""
    graph = Graph("hunyuan_video15_text_to_video")
    unet, vae = parts.models(graph, files.HUNYUAN15, files.HUNYUAN15_VAE)
    clip = graph.add(
        graph.groups[0], "DualCLIPLoader", clip_name1=files.QWEN_25, clip_name2=files.BYT5, type="hunyuan_video_15"
    )["CLIP"]  # fmt: skip
    model, vae = parts.compiled(graph, unet, vae)
    texts = parts.prompts(graph, clip)
    pixels = ("custom", 1280, 720)
    latent = parts.latent(graph, graph.group("Size"), pixels, "EmptyHunyuanVideo15Latent", length=121)
    group = graph.group("Sample")
    shifted = graph.add(group, "ModelSamplingSD3", model=model, shift=7.0)["MODEL"]
    guider = graph.add(group, "CFGGuider", model=shifted, positive=texts[0], negative=texts[1], cfg=6.0)["GUIDER"]
    sigmas = graph.add(group, "BasicScheduler", model=model)["SIGMAS"]
    sampled = _custom(graph, group, guider, sigmas, latent, "euler")
    _decoded(graph, sampled, vae, 24.0)
    graph.note("""## HunyuanVideo 1.5, compiled
1. Press **Run**. The first run compiles, and the nodes show it. Another size or length compiles nothing.
2. At 720p a step is long and the GPU is busy all the time: what gains are fused kernels, not captures.
3. The text encoders stay ComfyUI's own. **Compile VAE Decode** says what it does with this decoder.""")
    return graph


def ltx2_text_to_video() -> Graph:
    """Text to video with sound with LTX-2, in two stages."""
    graph = Graph("ltx2_text_to_video")
    group = graph.group("Models")
    loader = graph.add(group, "CheckpointLoaderSimple", ckpt_name=files.LTX2)
    distilled = graph.add(group, "LoraLoaderModelOnly", model=loader["MODEL"], lora_name=files.LTX2_DISTILLED)
    sound = graph.add(group, "LTXVAudioVAELoader", ckpt_name=files.LTX2)["VAE"]
    upscaler = graph.add(group, "LatentUpscaleModelLoader", model_name=files.LTX2_UPSCALER)["LATENT_UPSCALE_MODEL"]
    # Last: in Nodes 2.0 this loader has room in its frame for the bar of a missing model.
    clip = graph.add(group, "LTXAVTextEncoderLoader", text_encoder=files.GEMMA_3, ckpt_name=files.LTX2)["CLIP"]
    first, vae = parts.compiled(graph, loader["MODEL"], loader["VAE"])
    second = graph.add(graph.groups[-1], "ResoluteCompileModel", model=distilled["MODEL"])["MODEL"]
    texts = parts.prompts(graph, clip)
    group = graph.group("Size")
    video = graph.add(group, "EmptyLTXVLatentVideo", width=640, height=352, length=121)["LATENT"]
    quiet = graph.add(group, "LTXVEmptyLatentAudio", audio_vae=sound, frames_number=121, frame_rate=24.0)["LATENT"]
    both = graph.add(group, "LTXVConcatAVLatent", video_latent=video, audio_latent=quiet)["latent"]
    group = graph.group("First stage")
    prompts = graph.add(group, "LTXVConditioning", positive=texts[0], negative=texts[1], frame_rate=24.0)
    links = {"positive": prompts["positive"], "negative": prompts["negative"]}
    guider = graph.add(group, "CFGGuider", model=first, cfg=4.0, **links)["GUIDER"]
    sigmas = graph.add(group, "LTXVScheduler", latent=both)["SIGMAS"]
    sampled = _custom(graph, group, guider, sigmas, both, "euler_ancestral")
    parted = graph.add(group, "LTXVSeparateAVLatent", av_latent=sampled)
    group = graph.group("Second stage, twice as large")
    cropped = graph.add(group, "LTXVCropGuides", latent=parted["video_latent"], **links)
    larger = graph.add(
        group, "LTXVLatentUpsampler", samples=cropped["latent"], upscale_model=upscaler, vae=loader["VAE"]
    )["LATENT"]  # fmt: skip
    both = graph.add(group, "LTXVConcatAVLatent", video_latent=larger, audio_latent=parted["audio_latent"])["latent"]
    links = {"positive": cropped["positive"], "negative": cropped["negative"]}
    guider = graph.add(group, "CFGGuider", model=second, cfg=1.0, **links)["GUIDER"]
    sigmas = graph.add(group, "ManualSigmas", sigmas="0.909375, 0.725, 0.421875, 0.0")["SIGMAS"]
    sampled = _custom(graph, group, guider, sigmas, both, "euler_ancestral", seed=0)
    group = graph.group("Result")
    parted = graph.add(group, "LTXVSeparateAVLatent", av_latent=sampled)
    images = graph.add(
        group, "VAEDecodeTiled", samples=parted["video_latent"], vae=vae, temporal_size=4096
    )["IMAGE"]  # fmt: skip
    heard = graph.add(group, "LTXVAudioVAEDecode", samples=parted["audio_latent"], audio_vae=sound)["AUDIO"]
    parts.video(graph, images, 24.0, heard)
    for group in graph.groups:
        graph.collapse(group, *_SMALL)
    graph.note("""## LTX-2 with sound, compiled
1. Press **Run**. The first run compiles. The second stage is twice as large, and compiles nothing.
2. The second model is the first one with a LoRA, and shares its compiled blocks.
3. The text encoder (Gemma), the upscaler and the decoder of the sound stay ComfyUI's own.""")
    return graph


def minimax_h3_text_to_video() -> Graph:
    """Text to video with sound with MiniMax H3."""
    graph = Graph("minimax_h3_text_to_video")
    unet, vae = parts.models(graph, files.H3, files.H3_VAE)
    group = graph.groups[0]
    sound = graph.add(group, "VAELoader", "Load VAE of the Sound", vae_name=files.H3_SOUND)["VAE"]
    clip = graph.add(group, "CLIPLoader", clip_name=files.H3_TEXT, type="minimax")["CLIP"]
    model, vae = parts.compiled(graph, unet, vae)
    group = graph.group("Prompt")
    start = graph.add(
        group, "MiniMaxH3ImageToVideo", clip=clip, vae=vae, prompt=parts.POSITIVE,
        **parts.resolution(graph, group, ("custom", 864, 480)),
    )  # fmt: skip
    group = graph.group("Sample")
    guider = graph.add(group, "BasicGuider", model=model, conditioning=start["positive"])["GUIDER"]
    sigmas = graph.add(group, "BasicScheduler", model=model)["SIGMAS"]
    sampled = _custom(graph, group, guider, sigmas, start["LATENT"], "res_multistep")
    group = graph.group("Result")
    images = graph.add(group, "VAEDecode", samples=sampled, vae=vae)["IMAGE"]
    heard = graph.add(group, "VAEDecodeAudio", samples=sampled, vae=sound)["AUDIO"]
    parts.video(graph, images, 24.0, heard)
    graph.note("""## MiniMax H3, compiled
1. Press **Run**. The first run compiles, and the nodes show it. Another size or length compiles nothing.
2. The weights are int8: the node says how their products are computed on your card.
3. The text encoder (32 billion weights) and the decoder of the sound stay ComfyUI's own.
4. It needs a ComfyUI that has MiniMax H3, 0.33 for example.""")
    return graph


def _custom(
    graph: Graph, group: Group, guider: Output, sigmas: Output, start: Output, sampler: str, seed: int = 1
) -> Output:
    """The latent of a custom sampler with its parts."""
    control = "randomize" if seed else "fixed"
    noise = graph.add(group, "RandomNoise", noise_seed=seed, control_after_generate=control)["NOISE"]
    chosen = graph.add(group, "KSamplerSelect", sampler_name=sampler)["SAMPLER"]
    links = {"noise": noise, "guider": guider, "sampler": chosen, "sigmas": sigmas, "latent_image": start}
    return graph.add(group, "SamplerCustomAdvanced", **links)["output"]


def _decoded(graph: Graph, latent: Output, vae: Output, fps: float) -> None:
    group = graph.group("Result")
    parts.video(graph, graph.add(group, "VAEDecode", samples=latent, vae=vae)["IMAGE"], fps)


VIDEOS_AND_EDITS: tuple[Callable[[], Graph], ...] = (
    qwen_image_edit,
    wan22_image_to_video,
    ltx2_text_to_video,
    minimax_h3_text_to_video,
    hunyuan_video15_text_to_video,
)
