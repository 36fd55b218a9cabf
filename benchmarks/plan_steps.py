"""The steps of `plan`: each run on a GPU that the claims need, in order."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

_MODELS, _FOLDER = "MODELS", "FOLDER"  # in a command, in place of the folders


class Step(NamedTuple):
    """command: without `--out` and the time. seconds: about how long it takes on an H200. settles: what it shows.

    gb: of disk that its models may take. whole: it knows no time limit, so it begins only where it fits.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    settles: str
    gb: int = 10
    whole: bool = False

    def text(self) -> str:
        """The command for people."""
        words = ("python", *self.command) if self.command[0] == "-m" else self.command
        return shlex.join([*words, *self.timed("SECONDS")])

    def timed(self, seconds: str) -> list[str]:
        """The arguments for the result and for the time that the step has."""
        if self.whole:
            return []
        return ["--out", f"{_FOLDER}/{self.name}.json", "--seconds", seconds]

    def arguments(self, folder: Path, models: Path, seconds: float) -> list[str]:
        """The command line. seconds: that the step has."""
        words = [*self.command, *self.timed(f"{seconds:.0f}")]
        places = {_MODELS: str(models), _FOLDER: str(folder)}
        words = [_placed(word, places) for word in words]
        return [sys.executable, *words]


def _placed(word: str, places: dict[str, str]) -> str:
    head, slash, rest = word.partition("/")
    return f"{places[head]}{slash}{rest}" if head in places else word


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *arguments)


_KEPT = ("--models", _MODELS)
_SDXL = ("--folder", f"{_FOLDER}/sdxl")  # one store for all that run SDXL
_OURS = ("--contenders", "resolute", "--no-resident", "--profile")
_STREAMED = ("--cells", "flux:12", "flux:8", "--folder", f"{_FOLDER}/streamed")
STEPS = (
    Step(
        "tests",
        ("scripts/test", "--gpu", "--", "-q"),
        260,
        "captures, also broken ones, attention by shape, quantized products and parity are right here",
        whole=True,
    ),
    Step(
        "tour",
        _module("tour", "--kind", "sdxl", "--backends", "inductor", *_SDXL),
        240,
        "SDXL at nine sizes: seconds, ms a step, the stall of a new size",
    ),
    Step(
        "lcm",
        _module("tour", "--kind", "sdxl", "--backends", "inductor", "--sizes", "1", "--sampler", "lcm", *_SDXL),
        40,
        "seconds of a whole prompt of four LCM steps",
    ),
    Step(
        "families",
        _module("families", "--no-core", "--sizes", "1", "--family", "ltx", "flux", "hunyuan-1.5", *_KEPT),
        120,
        "LTX and HunyuanVideo with masks by shape at least 1.15 times stock; Flux with fused rotary",
        25,
    ),
    Step(
        "kernels",
        _module("kernel_trials", "--family", "Flux", "LTX", "SDXL", "--variants", "before", "present", "only rotary"),
        130,
        "what the kernels of blocks gain",
    ),
    Step(
        "restart",
        _module("restart", "--contenders", "stock", "resolute", "--sizes", "1", "--pause", "6"),
        130,
        "SDXL cold, after a restart, and at a new size",
    ),
    Step(
        "streamed",
        _module("streamed", *_STREAMED, *_OURS, "--environment", "RESOLUTE_SPLIT=1"),
        150,
        "whether `RESOLUTE_SPLIT=1` gains anything where Flux does not fit",
        30,
    ),
    Step(
        "streamed-whole",
        _module("streamed", *_STREAMED, *_OURS),
        120,
        "the same without it",
        30,
    ),
    Step(
        "small-cards",
        _module(
            "small_cards", "--cells", "sdxl:8", "sdxl:6", "sdxl:12", "sdxl:10", "flux:12", "flux:8", "flux:16",
            *_KEPT, "--folder", f"{_FOLDER}/small-cards",
        ),
        900,
        "nobody with 6 to 16 GiB is slower than with stock; what stays after Unload and Free",
        25,
    ),
    Step(
        "video",
        _module("video", "--cells", "sdxl", "hunyuan", "hunyuan15", "h3", "wan22", "wan", "flux", "qwen"),
        440,
        "SDXL's decode at 1024x1024 in at most 40 ms; which way each decoder of videos and each encoder is faster here",
    ),
    Step(
        "video-whole",
        _module("video_whole", "--folder", f"{_FOLDER}/video"),
        220,
        "whole prompts of Wan 2.2's two models and of LTX",
    ),
    Step(
        "video-small",
        _module("video", "--free", "8", "12", "--cells", "wan:decode", "hunyuan", "h3", "flux"),
        300,
        "decoders of videos with 8 and 12 GiB free: not slower, and never out of memory where stock is not",
    ),
    Step(
        "quantized",
        _module(
            "quantized", "--row", "flux:fp8-scaled", "qwen-image:fp8-scaled", "wan:fp8-scaled", "flux:int8",
            "--lora", "flux:fp8-scaled", *_KEPT,
        ),
        220,
        "the quantized rows that are missing, and captures with a LoRA",
        40,
    ),
    Step(
        "profile",
        _module("step_profile", "--servers", "measured", "--family", "sdxl", "flux", "--sizes", "1", *_KEPT),
        120,
        "the kernels of a step by kind",
        25,
    ),
    Step(
        "guidance",
        (
            "scripts/test", "--", "tests/comfy/matrix/test_guidance.py", "-k", "transformer", "--on-cuda",
            "--server-argument=--force-fp32",
        ),
        100,
        "step caches skip the same steps of a transformer that is captured",
        whole=True,
    ),
    Step(
        "fuzz",
        ("scripts/fuzz", "--on-cuda", "--sequences", "200", "--at-once", "4", "--as-found", "--seed", "31001"),
        400,
        "no sequence of changes is wrong with captures",
    ),
    Step(
        "soak",
        _module("soak", "--free", "12", *_SDXL),
        500,
        "500 prompts: memory flat, no compile after the first",
    ),
    Step(
        "other-families",
        _module(
            "families", "--no-core", "--sizes", "1", "--family", "z-image", "qwen-image", "wan", "krea2", "minimax-h3",
            *_KEPT,
        ),
        160,
        "the other transformers at least 1.15 times stock",
        35,
    ),
    Step(
        "fleet",
        _module("fleet", "--gpus", "0.5", "--folder", f"{_FOLDER}/fleet"),
        600,
        "what our router gains beside Serve's where two of four checkpoints fit; needs requirements-fleet.txt",
    ),
    Step(
        "bf16",
        _module("half_precision", "--bf16"),
        150,
        "in bfloat16 the error is at most 1.5 times ComfyUI's own, against float32",
    ),
    Step(
        "bf16-casts",
        _module("half_precision", "--bf16", "--precision-casts"),
        150,
        "the same where inductor rounds as ComfyUI's kernels do",
    ),
)  # fmt: skip
