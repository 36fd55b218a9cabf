"""Compare a 16-bit model, its formats from Load Diffusion Model (Faster Format), and stock ComfyUI.

    python -m benchmarks.formats --out FILE [--model Flux] [--format fp8] [--folder FOLDER] [--models FOLDER]
                                 [--unquantized] [--patch NAGuidance] [--seconds 540] [--commit HASH] [--argument ...]
                                 [--cpu]

A row is a contender: stock, Resolute, and Resolute with the node in each format, all with the same file, each in its
own server with an empty store. `first_seconds`: of the first prompt, which loads. After a second one, since the first
may end before the compiler is imported, the benchmark waits until no compile is pending (`waited`, not part of any
figure). Then it runs prompts until all code is compared (`is_settled`), one of one step and three whole ones: `step_ms`
is (median - that of one step) / (steps - 1). `--unquantized` leaves out the formats, `--patch` adds a node of ComfyUI
after each model (MultiGPU_WorkUnits uses one card with `--argument=--cuda-device=0`). GiB: `peak_gib` of the device,
the server's `rss_gib`, and the part of it that no file backs, `unbacked_gib`. `errors`: of the whole prompts' latents
to stock's; `psnr`: of their pictures, for SDXL only. `told`: the node's text, and why calls are not captured or stay
uncompiled; `events`: of the whole run. Stock comes first, since the others are compared with it.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import psutil
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from scripts.errors import as_command
from scripts.models import generated
from scripts.places import ROOT
from scripts.server.client import Client, History, execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import family_models, rig, workloads
from .card_memory import GIB, Memory, used_bytes
from .cells import Cells, OutOfTimeError, Row, add_options
from .family_models import Family, family
from .rig import OURS, STOCK, commit_of, node
from .weight_formats import file_of

MODELS = {"Flux": "flux", "Klein": "klein", "Z-Image": "z-image", "SDXL": "sdxl", "Wan": "wan"}
FORMATS = ("fp8", "int8", "auto", "nvfp4")  # of the node; the last one only on request
START, SETTLE, WHOLE, STEPS = 60.0, 12, 3, 10  # seconds of a contender at least; prompts that settle, whole ones; steps
TOLD = ("largest error", rig.NO_GAIN, "is left alone")  # in the pack's log: parts of the lines that a row keeps
UNSETTLED = ("region_compiles", "original_replays", "waiting_calls")  # counters: code is still compiled or compared
NAG, KV_CACHE, SPLIT = "NAGuidance", "FluxKVCache", "MultiGPU_WorkUnits"  # nodes of ComfyUI
PATCHES: dict[str, dict[str, float]] = {
    NAG: {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}, KV_CACHE: {}, SPLIT: {"max_gpus": 2},
}  # fmt: skip
_PARTS = {"diffusion_models": "model.diffusion_model.", "vae": "first_stage_model."}
_UNET = Family("", {}, (), 77, 2048, 1280, "EmptyLatentImage", 1, (4, 8), None, ((1024, 1024),))


def make(setup: command.Setup, models: Path, name: str, is_small: bool) -> Family:
    """Make a model's files; for SDXL, one with the UNet and one with the VAE. is_small: SD1.5 in place of SDXL."""
    if name not in workloads.CHECKPOINTS:
        family_models.ensure(setup, models, [name], is_small)
        return family(name, is_small)
    made = generated.ensure("sd15-mini" if is_small else name, setup.python, setup.comfyui)
    for folder, prefix in _PARTS.items():
        out = models / folder / file_of(name)
        if not out.is_file():
            out.parent.mkdir(parents=True, exist_ok=True)
            with safe_open(made, "pt") as file:
                keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (no mapping)
                save_file({key.removeprefix(prefix): file.get_tensor(key) for key in keys}, out)
    return _UNET._replace(width=768, pooled=0, sizes=((128, 128),)) if is_small else _UNET


def prompt(name: str, made: Family, contender: str, steps: int, seed: int, patch: str = "") -> dict[str, Any]:
    """A contender's prompt. contender: stock, Resolute, or a format of the node with Resolute. patch: one of PATCHES;
    with the cache of keys and values, the latent is also a reference; with the split over two GPUs, CFG is on.
    """
    nodes = workloads.transformer(name, made, (*made.sizes[0], 1, ""), steps, seed)
    if contender in FORMATS:
        nodes["load"] = node("ResoluteLoadDiffusionModel", unet_name=file_of(name), format=contender, keep=False)
    if name in workloads.CHECKPOINTS:
        nodes["sample"]["inputs"].update(cfg=7.0, scheduler="normal")
        nodes |= {"vae": node("VAELoader", vae_name=file_of(name))} | rig.decoded("sample", ["vae", 0])
    nodes = workloads.as_contender(nodes, STOCK if contender == STOCK else OURS)
    if patch == SPLIT:
        nodes["sample"]["inputs"]["cfg"] = 7.0
    if patch == KV_CACHE:
        nodes["reference"] = node("ReferenceLatent", conditioning=["positive", 0], latent=["latent", 0])
        nodes["sample"]["inputs"]["positive"] = ["reference", 0]
    return rig.with_model_node(nodes, "patch", patch, **PATCHES[patch]) if patch else nodes


def psnr(found: Any, reference: Any) -> float | None:
    """The PSNR of pictures with levels 0 to 255, in dB; None if they are equal."""
    square = float(numpy.mean((found.astype("float64") - reference) ** 2))
    return 10 * math.log10(255**2 / square) if square else None


class Formats:
    """Measures the contenders of one model. Stock's latents and pictures are kept in the folder of the run."""

    def __init__(self, setup: command.Setup, options: argparse.Namespace, cells: Cells, model: str) -> None:
        self._setup, self._options, self._cells, self._model = setup, options, cells, model
        self._made = make(setup, options.models, MODELS[model], options.cpu)
        self._steps = 3 if options.cpu else STEPS
        used_bytes()  # this process's own context is no part of a peak

    def measure(self, contender: str) -> Row:
        """A contender's row. Raises OutOfTimeError, PromptError or ServerError."""
        folder = Path(tempfile.mkdtemp(prefix=f"{self._model}-{contender}-", dir=self._options.folder))
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": None}
        store = "0" if contender == STOCK else str(folder / "store")
        before = used_bytes()
        server = rig.server(
            self._setup, folder / "server", self._options.argument, models=self._options.models, cpu=self._options.cpu,
            environment={**caches, "RESOLUTE_STORE": store, "RESOLUTE_COMPILE": None},
        )  # fmt: skip
        with server:
            assert server.process is not None
            process = psutil.Process(server.process.pid)
            memory = Memory(process)
            try:
                row = self._prompts(server, contender)
            finally:
                taken = memory.take()
                memory.close()
            held = process.memory_info()
            self._cells.about |= rig.environment(server)
            lines = [line.partition("Resolute: ")[2] for line in server.log().splitlines()]
            told = [line for line in lines if any(part in line for part in TOLD)]
        sizes = {"peak_gib": taken["device_gib"] - before / GIB, "rss_gib": held.rss / GIB}
        sizes["unbacked_gib"] = (held.rss - held.shared) / GIB
        return {**row, **{key: round(size, 2) for key, size in sizes.items()}, "told": told}

    def _prompts(self, server: ComfyServer, contender: str) -> Row:
        """Run the loading, settling, one-step and whole prompts, and return their row."""
        client, row = server.client, dict[str, Any]()
        seconds, errors, levels = list[float](), list[float | None](), list[float | None]()

        def run(seed: int, steps: int = self._steps) -> tuple[History, dict[str, Any]]:
            left, before = self._cells.seconds_left, rig.counters(client)
            if left < 1:
                raise OutOfTimeError
            nodes = prompt(MODELS[self._model], self._made, contender, steps, seed, self._options.patch)
            history = client.run(nodes, left)
            seconds.append(execution_seconds(history))
            return history, rig.rise(before, rig.counters(client))

        run(1)
        run(2)
        if contender != STOCK:
            row["waited"] = self._until_compiled(client)
        for number in range(SETTLE):
            risen = run(100 + number)[1]
            row["is_settled"] = not any(risen[name] for name in UNSETTLED)
            if row["is_settled"]:
                break
            if not risen["region_compiles"]:  # code for other sizes
                self._until_compiled(client)
        run(4, 1)
        before, alone = rig.counters(client), seconds[-1]
        for number in range(WHOLE):
            found = self._compared(server, run(5 + number)[0], contender, number)
            errors.append(found[0])
            levels.append(found[1])
        step = 1000 * (statistics.median(seconds[-WHOLE:]) - alone) / (self._steps - 1)
        row |= {"model": self._model, "patch": self._options.patch, "contender": contender}
        row |= {"step_ms": round(step, 2), "first_seconds": seconds[0]}
        row |= {"seconds": seconds, "errors": errors, "psnr": levels, "steps": self._steps}
        row["events"] = client.get("/resolute/events")["events"] if contender != STOCK else []
        return {**row, "counters": rig.rise(before, rig.counters(client))}

    def _until_compiled(self, client: Client) -> dict[str, Any]:
        return rig.until_compiled(client, min(rig.COMPILE_TIMEOUT, self._cells.seconds_left))

    def _compared(
        self, server: ComfyServer, history: History, contender: str, number: int
    ) -> tuple[float | None, float | None]:
        """The error of a prompt's latents to stock's, and the PSNR of its pictures; None for a missing figure."""
        client, place = server.client, self._options.folder / f"{self._model}-{self._options.patch}-{number}.npz"
        pictures = [numpy.asarray(Image.open(io.BytesIO(file))) for file in client.images(history)]
        found = {"latents": rig.latents(client, history), "pictures": numpy.array(pictures)}
        if contender == STOCK:
            numpy.savez(place, **found)
        if contender == STOCK or not place.is_file():
            return None, None
        stock = numpy.load(place)
        level = psnr(found["pictures"], stock["pictures"]) if pictures else None
        return rig.error(found["latents"], stock["latents"]), level


def key_of(row: Row) -> tuple[str, str, str]:
    return row["model"], row.get("patch", ""), row["contender"]


def line(row: Row, stock: Row | None) -> str:
    """A row as text for people, with its ratios to stock."""
    found = [f"{row['step_ms']:.1f} ms a step", f"first {row['first_seconds']:.1f} s"]
    if stock and stock is not row:
        faster, first = stock["step_ms"] / row["step_ms"], row["first_seconds"] / stock["first_seconds"]
        found = [f"{found[0]} ({faster:.2f} x)", f"{found[1]} ({first:.2f} of stock's)"]
    found.append(f"peak {row['peak_gib']}, host {row['rss_gib']}, unbacked {row['unbacked_gib']} GiB")
    for name, unit, values in (("error", "", row["errors"]), ("PSNR", " dB", row["psnr"])):
        known = [each for each in values if each is not None]
        found += [f"{name} {statistics.median(known):.3g}{unit}"] if known else []
    return f"{' '.join(key_of(row))}: {', '.join([*found, *row['told']])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="all without it")
    parser.add_argument("--format", action="append", choices=FORMATS, help="fp8, int8 and auto without it")
    parser.add_argument("--unquantized", action="store_true", help="only stock and Resolute, with the file as it is")
    parser.add_argument("--patch", choices=list(PATCHES), default="", help="implies --unquantized")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; 40 GB")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where git does not know it")
    add_options(parser, seconds=540, cpu="small models")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
    with tempfile.TemporaryDirectory(prefix="resolute-formats-", ignore_cleanup_errors=True) as work:
        options.folder = (options.folder or Path(work)).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        options.models = (options.models or options.folder / "models").resolve()
        return run(command.prepare(), options)


def run(setup: command.Setup, options: argparse.Namespace) -> int:
    """Measure the rows that the file lacks. Returns 1 if one failed."""
    cells = Cells(options, key_of)
    cells.about |= {**commit_of(ROOT, options.commit), "arguments": rig.without_paths(options.argument)}
    cells.about |= {"is_cpu": options.cpu}
    formats = () if options.unquantized or options.patch else options.format or FORMATS[:3]
    for model in options.model or MODELS:
        wanted = [each for each in (STOCK, OURS, *formats) if cells.lacks((model, options.patch, each))]
        if not wanted or cells.seconds_left < START:
            for contender in wanted:
                cells.skip(f"{model} {contender}")
            continue
        measured = Formats(setup, options, cells, model)
        for contender in wanted:
            row = cells.measure(f"{model} {contender}", functools.partial(measured.measure, contender), START)
            if row is not None:
                print(line(row, cells.find((model, options.patch, STOCK))), flush=True)
    cells.save()
    return 1 if cells.failed else 0


if __name__ == "__main__":
    sys.exit(as_command(main))
