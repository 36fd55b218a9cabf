"""All that a GPU has to show: the scenarios of `benchmarks.run`, and the steps of `benchmarks.plan`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

_MODELS, _FOLDER = "MODELS", "FOLDER"  # in a command, in place of the folders


class Scenario(NamedTuple):
    """models: of `workloads`; flux@12: with 12 GiB free. settles: what it shows. seconds: that it takes on an H200.

    contenders: of `workloads`, ours first. sizes: so many of each model. is_restart: each contender begins
    with nothing on disk, and is measured after a restart. with_lora: also with a LoRA. gb: of disk for its models.
    """

    models: tuple[str, ...]
    settles: str
    seconds: int
    contenders: tuple[str, ...] = ("resolute", "stock")
    sizes: int = 1
    is_restart: bool = False
    with_lora: bool = False
    arguments: tuple[str, ...] = ()
    gb: int = 10


SCENARIOS = {
    "tour": Scenario(
        ("sdxl",), "SDXL at nine sizes: seconds, ms a step, how long a new size waits", 240, sizes=9,
    ),
    "restart": Scenario(
        ("sdxl",), "SDXL cold, after a restart, and at a new size, beside core's TorchCompileModel", 240,
        ("resolute", "stock", "core"), sizes=2, is_restart=True,
    ),
    "families": Scenario(
        ("flux", "ltx", "hunyuan-1.5", "qwen-image", "wan", "z-image", "krea2", "minimax-h3"),
        "a step of each transformer is at least 1.15 times as fast as stock's", 280, gb=60,
    ),
    "quantized": Scenario(
        ("flux:fp8-scaled", "qwen-image:fp8-scaled", "wan:fp8-scaled", "flux:int8"),
        "quantized weights are as near to float32 as in stock, also with a LoRA, which captures nothing again", 260,
        ("resolute", "stock", "reference"), with_lora=True, gb=40,
    ),
    "gguf": Scenario(
        ("flux:q8-0", "flux:q4-k"), "GGUF files beside the nodes of ComfyUI-GGUF, with a LoRA and without", 120,
        ("resolute", "stock", "reference"), with_lora=True, gb=30,
    ),
    "small-cards": Scenario(
        (
            "sdxl@8", "sdxl@6", "sdxl@12", "flux@12", "flux@8", "flux@16", "flux:fp8-scaled@8", "flux:fp8-scaled@12",
            "sdxl@10",
        ),
        "nobody with 6 to 16 GiB is slower than with stock; first prompts; what stays after Unload and Free", 900,
        sizes=2, gb=35,
    ),
    "streamed": Scenario(
        ("flux-full@12", "flux-full@8", "qwen-image-full:fp8-scaled@8"),
        "seconds of a step where a model does not fit, beside stock", 400,
        gb=50,
    ),
    "whole": Scenario(
        ("wan22-video", "ltx-video", "qwen-image-edit", "sdxl-controlnet"),
        "whole prompts of Wan 2.2's two models, LTX, Qwen-Image with a picture to edit, SDXL with a ControlNet", 400,
        gb=20,
    ),
    "deepcache": Scenario(
        ("sdxl", "demo"), "what DeepCache gains on SDXL, and its error with a trained model", 200,
        ("resolute", "deepcache-2", "deepcache-3", "deepcache-5", "stock"), sizes=4,
    ),
    "half-precision": Scenario(
        ("sdxl", "sd15"), "in half precision compiled and stock are equally far from float32", 120,
        ("resolute", "cudagraph", "stock", "reference"), sizes=2, arguments=("--fp16-unet",),
    ),
    "oneflow": Scenario(
        ("sd15",), "what a OneFlow graph costs to build, to run and in memory", 300, ("oneflow", "stock"), sizes=3,
        arguments=("--force-fp32",),
    ),
}  # fmt: skip


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


def _scenario(name: str) -> Step:
    kept = ("--models", _MODELS, "--folder", f"{_FOLDER}/{name}")
    found = SCENARIOS[name]
    return Step(name, _module("run", name, *kept), found.seconds, found.settles, found.gb)


STEPS = (
    Step(
        "smoke",
        _module(
            "smoke", "--models", _MODELS, "--folder", f"{_FOLDER}/smoke", "--bundle", f"{_FOLDER}/regions.bundle"
        ),
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
        "queue",
        _module("queue", "--models", _MODELS, "--folder", f"{_FOLDER}/queue"),
        1200,
        "prompts back to back, with nothing on disk, after a restart, and with 8 and 6 GiB free, beside stock's",
        25,
    ),
    *map(_scenario, ("tour", "restart", "families", "quantized", "small-cards", "streamed")),
    Step(
        "video",
        _module("video", "--cells", "sdxl", "hunyuan", "hunyuan15", "h3", "wan22", "wan", "flux", "qwen"),
        440,
        "SDXL's decode at 1024x1024 in at most 40 ms; which way each decoder of videos and each encoder is faster here",
    ),
    _scenario("whole"),
    Step(
        "video-small",
        _module("video", "--free", "8", "12", "--cells", "wan:decode", "hunyuan", "h3", "flux"),
        600,
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
        _module("soak", "--prompts", "300", "--free", "12", "--folder", f"{_FOLDER}/soak"),
        300,
        "300 prompts: memory flat, no compile after the first",
    ),
    Step(
        "fleet",
        _module("fleet", "--gpus", "0.5", "--folder", f"{_FOLDER}/fleet"),
        600,
        "what our router gains beside Serve's where two of four checkpoints fit; needs requirements-fleet.txt",
    ),
    *map(_scenario, ("deepcache", "half-precision")),
)  # fmt: skip
