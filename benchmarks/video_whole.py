"""Whole prompts of videos, from sampling to frames: Wan 2.2's two models and LTX, stock ComfyUI and Resolute.

    python -m benchmarks.video_whole --out benchmarks/results/NAME-video.json [--rows wan22 ltx] [--free 8 12]
                                     [--seconds 240] [--folder FOLDER] [--cpu]

The models have their real width and fewer layers (Wan 2.2's have 4 of 40), with random weights. Each contender has a
server of its own. `first_s` is its first prompt, which compiles with Resolute; then come as many as it takes until
Resolute knows whether it decodes faster, and `stock_s` and `resolute_s` are the fastest of REPEATS after those.
`stock_peak_gib` and `resolute_peak_gib`: of the device, by that server. `error`: of the latents. With --free other
memory is held, so that so many GiB are free. Rows of the file that it does not measure stay, and a later run measures
what the file lacks. `--folder` keeps models and compiled code. `--cpu` checks the script with small models that are not
compiled, and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from scripts.server.client import Client, execution_seconds
from scripts.setup import command

from . import family_models, rig
from .card_memory import GIB, Memory, small_card, used_bytes
from .cells import Cells, add_options, parts
from .family_models import FAMILIES, family, file_of, make_all
from .rig import ROOT, STOCK, environment, node

OURS = "resolute"
REPEATS = 2
_MOST_PROMPTS = 8  # until Resolute knows which way it decodes faster
_WAN_14B = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 4}
_HIGH, _LOW = "wan-high", "wan-low"  # Wan 2.2's models for high and low noise
family_models.LARGE |= {
    name: FAMILIES["wan"]._replace(settings=FAMILIES["wan"].settings | _WAN_14B) for name in (_HIGH, _LOW)
}


class Row(NamedTuple):
    """models: of `family_models`. They sample one after the other, `steps` each. vae: of `VAES`."""

    models: tuple[str, ...]
    vae: str
    size: tuple[int, int]
    frames: int
    steps: int
    cfg: float


ROWS = {
    "wan22": Row((_HIGH, _LOW), "wan", (832, 480), 81, 2, 1.0),  # steps as with a distillation, as core's template
    "ltx": Row(("ltx",), "ltx", (768, 512), 121, 8, 1.0),
}


def prompt(name: str, contender: str, seed: int, is_small: bool) -> dict[str, Any]:
    """Sample with core's nodes and decode; the compile nodes are the only difference between contenders."""
    row = ROWS[name]
    first = family(row.models[0], is_small)
    width, height = first.sizes[0] if is_small else row.size
    text = {"tokens": first.tokens, "width": first.width, "pooled_width": first.pooled, "batch": 1}
    text |= {"padding": first.padding} if first.padding else {}
    frames = 9 if is_small else row.frames
    nodes: dict[str, Any] = {
        "positive": node("ResoluteTestConditioning", seed=1, **text),
        "negative": node("ResoluteTestConditioning", seed=2, **text),
        "latent": node(first.latent, width=width, height=height, length=frames, batch_size=1),
        "vae": node("VAELoader", vae_name=file_of(f"{row.vae}-vae")),
    }
    backend = "eager" if is_small else "inductor"  # a CPU would compile for minutes
    samples, vae, total = ["latent", 0], ["vae", 0], row.steps * len(row.models)
    for number, model_name in enumerate(row.models):
        nodes[f"load{number}"] = node("UNETLoader", unet_name=file_of(model_name), weight_dtype="default")
        model = [f"load{number}", 0]
        if contender == OURS:
            nodes[f"compile{number}"] = node("ResoluteCompileModel", model=model, backend=backend)
            model = [f"compile{number}", 0]
        is_last = number == len(row.models) - 1
        nodes[f"sample{number}"] = node(
            "KSamplerAdvanced", model=model, add_noise="disable" if number else "enable", noise_seed=seed, steps=total,
            cfg=row.cfg, sampler_name="euler", scheduler="simple", positive=["positive", 0], negative=["negative", 0],
            latent_image=samples, start_at_step=number * row.steps, end_at_step=(number + 1) * row.steps,
            return_with_leftover_noise="disable" if is_last else "enable",
        )  # fmt: skip
        samples = [f"sample{number}", 0]
    if contender == OURS:
        nodes["compile_vae"] = node("ResoluteCompileVAE", vae=vae, backend=backend)
        vae = ["compile_vae", 0]
    nodes["latents"] = node("ResoluteTestSaveLatent", samples=samples, filename_prefix="latents")
    nodes["decode"] = node("VAEDecode", samples=samples, vae=vae)
    nodes["one"] = node("ImageFromBatch", image=["decode", 0], batch_index=0, length=1)  # all would take seconds
    nodes["save"] = node("SaveImage", images=["one", 0], filename_prefix="frames")
    return nodes


def make(folder: Path, comfyui: Path, names: list[str], is_small: bool) -> None:
    """Write the models and VAEs, in a process of their own."""
    import safetensors.torch
    import torch

    models = list(dict.fromkeys(model for name in names for model in ROWS[name].models))
    make_all(comfyui, folder / "diffusion_models", models, is_small)
    weights_of = importlib.import_module("benchmarks.video_models").weights_of
    for vae in {ROWS[name].vae for name in names}:
        out = folder / "vae" / file_of(f"{vae}-vae")
        if not out.exists():
            weights = {key: value.to(torch.bfloat16).contiguous() for key, value in weights_of(vae, is_small).items()}
            safetensors.torch.save_file(weights, str(out))


class Contender:
    """A server, and its prompts."""

    def __init__(self, name: str, who: str, client: Client, memory: Memory | None, is_small: bool) -> None:
        self.name, self.who, self.client, self.memory, self.is_small = name, who, client, memory, is_small

    def measure(self, before: int) -> dict[str, Any]:
        """before: bytes of the device that were in use before the server started."""
        first, _ = self._run(1)
        seed = 2
        while seed <= _MOST_PROMPTS and not self._is_compared():
            self._run(seed)
            seed += 1
        if self.memory is not None:
            self.memory.take()
        counters = rig.counters(self.client)
        runs = [self._run(20 + number) for number in range(REPEATS)]
        found: dict[str, Any] = {"first_s": first, "s": min(seconds for seconds, _ in runs), "prompts": seed - 1}
        found["latents"] = rig.latents(self.client, runs[0][1])
        if self.memory is not None:
            found["peak_gib"] = round(self.memory.take()["device_gib"] - before / GIB, 3)
        if self.who == OURS:
            risen = rig.rise(counters, rig.counters(self.client))
            names = ("replays", "region_calls", "region_compiles", "eager_calls", "bypasses")
            found |= {"counters": {name: risen[name] for name in names}}
            found["whole_calls"] = self.client.get("/resolute/cache")["whole_calls"]
        return found

    def _is_compared(self) -> bool:
        """Nothing of it is compared, or all is known."""
        if self.who == STOCK:
            return True
        return all(each["is_settled"] for each in self.client.get("/resolute/cache")["whole_calls"])

    def _run(self, seed: int) -> tuple[float, Any]:
        history = self.client.run(prompt(self.name, self.who, seed, self.is_small), 300)
        return execution_seconds(history), history


def measure(
    name: str, free: float | None, setup: command.Setup, models: Path, folder: Path, arguments: list[str], cpu: bool
) -> Iterator[dict[str, Any]]:
    """The row of a prompt, after each contender: ours, then stock."""
    row = ROWS[name]
    size = f"{row.size[0]}x{row.size[1]}"
    result: dict[str, Any] = {"model": name, "what": "whole", "size": size, "frames": row.frames, "free_gib": free}
    latents: dict[str, Any] = {}

    def add(who: str) -> None:
        found = _in_a_server(name, who, setup, models, folder, arguments, cpu)
        latents[who] = found.pop("latents")
        result["about"] = found.pop("about")
        result.update({f"{who}_{key}": value for key, value in found.items()})
        if who == STOCK:
            result["error"] = rig.error(latents[OURS], latents[STOCK])
            result["faster"] = round(result[f"{STOCK}_s"] / result[f"{OURS}_s"], 2)

    with small_card(free):
        yield from parts(result, (OURS, STOCK), add)


def _in_a_server(
    name: str, who: str, setup: command.Setup, models: Path, folder: Path, arguments: list[str], cpu: bool
) -> dict[str, Any]:
    caches = {each: str(folder / each.lower()) for each in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    server = rig.server(setup, folder / who, arguments, models=models, cpu=cpu, environment=caches)
    before = used_bytes()
    with server:
        assert server.process is not None
        memory = None if cpu else Memory(psutil.Process(server.process.pid))
        try:
            found = Contender(name, who, server.client, memory, cpu).measure(before)
        except Exception:
            print(server.log_tail(20), flush=True)
            raise
        finally:
            if memory is not None:
                memory.close()
            (folder / f"{name}-{who}.log").write_text(server.log(), "utf-8")
        return found | {"about": environment(server)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--free", nargs="*", type=float, default=[None], help="GiB that are free; all by default")
    add_options(parser, cpu="small models")
    parser.add_argument("--make", nargs=2, type=Path, metavar=("FOLDER", "COMFYUI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(*options.make, options.rows, options.cpu)
        return 0
    setup = command.prepare()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-video-"))
    models = folder / "models"
    for kind in ("diffusion_models", "vae"):
        (models / kind).mkdir(parents=True, exist_ok=True)
    child = [str(setup.python), "-m", "benchmarks.video_whole", "--make", str(models), str(setup.comfyui)]
    subprocess.run([*child, "--rows", *options.rows, *(["--cpu"] if options.cpu else [])], cwd=ROOT, check=True)
    cells = Cells(options, lambda row: (row["model"], row["what"], row["free_gib"]))
    used_bytes()  # this process's own context counts in every measurement alike
    for name, free in ((name, free) for free in options.free for name in options.rows):
        if cells.lacks((name, "whole", free)):
            given = (name, free, setup, models, folder, options.argument, options.cpu)
            row = cells.measure(f"{name} {free}", functools.partial(measure, *given))
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
