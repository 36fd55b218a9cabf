"""Prompts of a small SD1.5, as the front end loads them: node ids are numbers, and nodes have titles."""

from __future__ import annotations

from typing import Any

from scripts.workflows import SD15

from ..comfy.rig import node

# Compiling all of a model takes a minute. This leaves three small regions. One would be compiled before Cancel ends the
# run, and the next run would find nothing to compile.
LEFT_OUT = "ResBlock, BasicTransformerBlock"
# Widgets with which nothing has to be compiled for a run.
EAGER = {
    f"Resolute{name}.backend": "eager"
    for name in ("LoadCheckpoint", "CompileModel", "CompileVAE", "CompileVAEDecode", "CompileControlNet")
}
# What Measure against stock says of the seconds; on a busy machine such small models differ by less than their prompts.
_TIME = r"[\d.]+ m?s"
FACTOR = (
    rf"({_TIME}, (\d+\.\dx stock|no clear difference from stock) \({_TIME}\)"
    rf"|stock {_TIME}, Resolute {_TIME}: slower here, because a CPU gains nothing)"
)
# And of the pictures, in float32.
PICTURE = r"(identical picture|same picture \(PSNR \d+ dB\))"


def stock(seed: int = 1, width: int = 144, height: int = 112) -> dict[str, Any]:
    """Text to image with ComfyUI's own nodes."""
    text = {"tokens": 77, "width": 768, "pooled_width": 768, "batch": 1}
    sampling = {"seed": seed, "steps": 2, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    return {
        "1": node("CheckpointLoaderSimple", ckpt_name=SD15),
        "2": node("ResoluteTestConditioning", seed=11, **text),
        "3": node("ResoluteTestConditioning", seed=12, **text),
        "4": node("EmptyLatentImage", width=width, height=height, batch_size=1),
        "5": node("KSampler", **links, **sampling),
        "6": node("VAEDecode", samples=["5", 0], vae=["1", 2]),
        "7": node("SaveImage", images=["6", 0], filename_prefix="small"),
    }


def compiled(**options: int) -> dict[str, Any]:
    """The same with Compile Model."""
    prompt = stock(**options)
    prompt["8"] = node("ResoluteCompileModel", model=["1", 0], backend="auto", batching="auto", leave_out=LEFT_OUT)
    prompt["5"]["inputs"]["model"] = ["8", 0]
    return prompt
