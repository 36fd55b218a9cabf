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
_STREAMED = ("--cells", "flux:12", "flux:8", "qwen-image:8", "--folder", f"{_FOLDER}/streamed", "--no-resident")
STEPS = (
    Step(
        "smoke",
        _module("smoke", *_KEPT, "--folder", f"{_FOLDER}/smoke", "--bundle", f"{_FOLDER}/regions.bundle"),
        240,
        "SDXL and Flux are within their bounds: cold, a restart, new sizes, a LoRA, a batch, unload, fp8, a decode",
        25,
    ),
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
        "restart",
        _module("restart", "--contenders", "resolute", "stock", "--sizes", "1", "--pause", "6"),
        130,
        "SDXL cold, after a restart, and at a new size",
    ),
    Step(
        "families",
        _module(
            "families", "--no-core", "--sizes", "1", "--family", "flux", "ltx", "hunyuan-1.5", "qwen-image", "wan",
            "z-image", "krea2", "minimax-h3", *_KEPT,
        ),
        280,
        "a step of each transformer is at least 1.15 times as fast as stock's",
        60,
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
        "streamed-whole",
        _module("streamed", *_STREAMED),
        300,
        "what streams where a model does not fit, beside stock",
        50,
    ),
    Step(
        "streamed",
        _module("streamed", *_STREAMED, "--contenders", "resolute", "--environment", "RESOLUTE_SPLIT=1"),
        200,
        "whether `RESOLUTE_SPLIT=1` is at least 1.2 times as fast in two of three",
        50,
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
        "fuzz",
        ("scripts/fuzz", "--on-cuda", "--sequences", "150", "--at-once", "4", "--as-found", "--seed", "31001"),
        300,
        "no sequence of changes is wrong with captures",
    ),
    Step(
        "soak",
        _module("soak", "--prompts", "300", "--free", "12", *_SDXL),
        300,
        "300 prompts: memory flat, no compile after the first",
    ),
    Step(
        "fleet",
        _module("fleet", "--gpus", "0.5", "--folder", f"{_FOLDER}/fleet"),
        600,
        "what our router gains beside Serve's where two of four checkpoints fit; needs requirements-fleet.txt",
    ),
)  # fmt: skip
