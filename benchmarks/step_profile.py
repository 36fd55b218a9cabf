"""Where the time of one step goes: the host, the GPU's kernels by kind, and what is left, stock and Resolute.

    python -m benchmarks.step_profile --out benchmarks/results/NAME-step-profile.json [--family sdxl flux] [--sizes 2]
                                      [--servers measured flash no-pages] [--models FOLDER] [--folder FOLDER]
                                      [--seconds 200] [--cpu]

Each server has settings of its own (SERVERS) and one store for all. For each size: stock and Resolute, three prompts
each. The first compiles and captures, the second is timed, and the last calls of the third run under torch's profiler.
`step_ms` is the time from one call of the model to the next, `host_ms` how long the host took for a call, `gpu_ms` the
time between the events around it, all medians of the second prompt. `kernels_ms` is how long the GPU was busy in a
profiled call, `kinds` its kernels (`benchmarks.kernel_kinds`), `kernels` each by name. So `step_ms` minus `kernels_ms`
is what the host, the pages or gaps between kernels take. `error` is that of the latents against stock's; `first_extra`
how many seconds the first prompt took longer than the second; `latents_sha256` tells whether two starts compute
the same (`--servers measured measured`). A cell is a size of a model on a server, with both contenders; a later run
with the same `--out` measures what it lacks. Needs CUDA and the environment of `scripts/test` (without a network, set
RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu` checks the script with small models and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from scripts.models import generated
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import families, rig
from .cells import Cells, add_options
from .family_models import family
from .kernel_kinds import by_kind
from .rig import ROOT, STOCK, environment, node, without_paths

OURS = "inductor"
STEPS, PROFILED = 20, 3
SIZES = {"sdxl": [(1024, 1024), (720, 720), (896, 768)], "flux": [(1024, 1024), (720, 960)]}


class Settings(NamedTuple):
    environment: dict[str, str]
    arguments: tuple[str, ...] = ()


SERVERS = {
    "flash": Settings({"RESOLUTE_ATTENTION": "flash"}),
    "measured": Settings({"RESOLUTE_ATTENTION": "measured"}),
    "no-pages": Settings({"RESOLUTE_ATTENTION": "flash"}, ("--disable-dynamic-vram",)),
}


class Prompts:
    """Makes the prompts of one model."""

    def __init__(self, model: str, checkpoint: str, is_small: bool) -> None:
        self.model, self._checkpoint, self._is_small = model, checkpoint, is_small

    def make(self, contender: str, size: tuple[int, int], steps: int, seed: int, name: str, profiled: int) -> Any:
        if self.model == "sdxl":
            nodes = rig.prompt(self._checkpoint, contender, (*size, 1, "a lighthouse"), steps, seed)
            for unwanted in ("decode", "save", "compile_vae"):
                nodes.pop(unwanted, None)
            text = {"tokens": 77, "width": 2048, "pooled_width": 1280, "batch": 1}
            for seed_of_text, name_of_text in enumerate(("positive", "negative")):
                nodes[name_of_text] = node("ResoluteTestConditioning", seed=1 + seed_of_text, **text)
        else:
            name_of_ours = STOCK if contender == STOCK else families.OURS
            make = family(self.model, self._is_small)
            nodes = families.prompt(self.model, make, name_of_ours, size, "default", steps, seed)
        sampler = nodes["sample"]["inputs"]
        watch = {"name": name, "calls": steps, "profiled": profiled}
        nodes["watch"] = node("ResoluteBenchmarkSteps", model=sampler["model"], **watch)
        sampler["model"] = ["watch", 0]
        return nodes


def measure(server: ComfyServer, prompts: Prompts, contender: str, size: tuple[int, int]) -> dict[str, Any]:
    """Three prompts: see the module."""
    client, seconds, files, latents = server.client, [], [], b""
    before = client.get("/resolute/cache")["counters"]
    for seed, (steps, profiled) in enumerate(((STEPS, 0), (STEPS, 0), (2 * PROFILED, PROFILED))):
        name = f"{prompts.model}-{contender}-{size[0]}x{size[1]}-{seed}"
        history = client.run(prompts.make(contender, size, steps, seed, name, profiled))
        seconds.append(execution_seconds(history))
        latents = latents or b"".join(client.images(history, "latents")[:1])
        files.append(json.loads((server.folder / "output" / f"{name}.json").read_text("utf-8")))
    after = client.get("/resolute/cache")["counters"]
    settled = files[1]["calls"][4:]
    row = {
        "contender": contender,
        "step_ms": _median(settled, "since_last_ms"),
        "host_ms": _median(settled, "host_ms"),
        "gpu_ms": _median(settled, "gpu_ms"),
        "seconds": seconds,
        "first_extra": seconds[0] - seconds[1],
        "counters": {key: after[key] - before[key] for key in after if key != "bypasses"},
        "bypasses": {key: n - before["bypasses"].get(key, 0) for key, n in after["bypasses"].items()},
        "latents": latents,
        "calls": files[1]["calls"],
        "first_calls": files[0]["calls"],
    }
    if profiles := sorted(files[2]["profiles"], key=lambda each: each["busy_ms"]):
        middle = profiles[len(profiles) // 2]
        row |= {"kernels_ms": middle["busy_ms"], "span_ms": middle["span_ms"], "kinds": by_kind(middle["kernels"])}
        names = sorted(middle["kernels"].items(), key=lambda item: -item[1][1])
        row |= {"kernels": dict(names), "host_calls": middle["host"]}
    return row


def _median(calls: list[dict[str, Any]], name: str) -> float | None:
    values = [call[name] for call in calls if name in call]
    return statistics.median(values) if values else None


def error(ours: bytes, stock: bytes) -> float | None:
    import numpy

    if not ours or not stock:
        return None
    a, b = (numpy.load(io.BytesIO(latents)).astype("float64") for latents in (ours, stock))
    return float(numpy.linalg.norm(a - b) / numpy.linalg.norm(b))


def line(row: dict[str, Any]) -> str:
    def number(name: str) -> str:
        return "-" if row.get(name) is None else f"{row[name]:.2f}"

    kinds = ", ".join(f"{kind} {each['ms']:.2f} ({each['count']})" for kind, each in row.get("kinds", {}).items())
    wrong = "-" if row["error"] is None else f"{row['error']:.1e}"
    return (
        f"{row['server']:<9} {row['model']:<5} {row['size']:<10} {row['contender']:<9} step {number('step_ms'):>7} "
        f"host {number('host_ms'):>7} gpu {number('gpu_ms'):>7} kernels {number('kernels_ms'):>7} error {wrong:>8} "
        f"first +{row['first_extra']:.2f} s {row['latents_sha256'][:6]}; {kinds} {row['bypasses'] or ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", choices=sorted(SIZES), default=["sdxl", "flux"])
    parser.add_argument("--sizes", type=int, default=2, help="visit only the first sizes of a model")
    parser.add_argument("--servers", nargs="*", choices=sorted(SERVERS), default=list(SERVERS))
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    add_options(parser, cpu="small models")
    options = parser.parse_args()
    cells = Cells(options, _cell)
    setup = command.prepare()
    with tempfile.TemporaryDirectory(prefix="resolute-profile-") as work:
        base, where = options.models or Path(work) / "models", options.folder or Path(work)
        prompts = [Prompts(model, _make(model, setup, base, options.cpu), options.cpu) for model in options.family]
        for number, name in enumerate(options.servers):
            start = options.servers[:number].count(name)
            wanted = [
                (prompt, size)
                for prompt in prompts
                for size in ([(64, 64), (96, 64)] if options.cpu else SIZES[prompt.model])[: options.sizes]
                if cells.lacks((name, start, prompt.model, f"{size[0]}x{size[1]}"))
            ]
            if wanted:
                _visit(name, start, setup, base, where, wanted, cells, options)
    print("\n".join(line(row) for cell in cells.rows for row in cell["contenders"]))
    return 0


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["server"], row["start"], row["model"], row["size"]


def _make(model: str, setup: command.Setup, base: Path, is_small: bool) -> str:
    """Make the model's file. Returns its name."""
    if model == "sdxl":
        made = generated.ensure("sdxl-mini" if is_small else "sdxl", setup.python, setup.comfyui)
        target = base / "checkpoints" / made.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(made)
        return made.name
    folder = base / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    child = [str(setup.python), "-m", "benchmarks.families", "--make", str(folder), str(setup.comfyui)]
    subprocess.run([*child, "--family", model, *(["--cpu"] if is_small else [])], cwd=ROOT, check=True)
    return families.file_of(model)


def _visit(
    name: str,
    start: int,
    setup: command.Setup,
    base: Path,
    where: Path,
    wanted: list[tuple[Prompts, tuple[int, int]]],
    cells: Cells,
    options: Any,
) -> None:
    """One server, and its cells. start: how many servers with these settings came before."""
    packs = {
        "resolute": ROOT,
        "resolute-test-pack": ROOT / "tests" / "pack",
        "step-profiler": ROOT / "benchmarks" / "step_profiler",
    }
    caches = {"RESOLUTE_STORE": str(where / "store"), "TORCHINDUCTOR_CACHE_DIR": str(where / "inductor")}
    server = ComfyServer(
        setup.python, setup.comfyui, where / f"{name}-{start}", packs=packs, models=base, cpu=options.cpu,
        arguments=(*options.argument, *SERVERS[name].arguments), environment=caches | SERVERS[name].environment,
    )  # fmt: skip
    with server:
        cells.about |= {**environment(server), "steps": STEPS, "is_cpu": options.cpu}
        cells.about["arguments"] = without_paths(options.argument)
        for prompt, size in wanted:
            about = {"server": name, "start": start, "model": prompt.model, "size": f"{size[0]}x{size[1]}"}
            cell = f"{name} {prompt.model} {size[0]}x{size[1]}"
            if cells.measure(cell, functools.partial(_both, server, prompt, size, about), 25) is not None:
                about = {f"attention {name}": server.client.get("/resolute/cache")["attention"]}
                cells.save(**about, **{f"events {name}": server.client.get("/resolute/events")})


def _both(server: ComfyServer, prompt: Prompts, size: tuple[int, int], about: dict[str, Any]) -> dict[str, Any]:
    """The row of a cell: stock, then Resolute."""
    reference, rows = b"", []
    for contender in (STOCK, OURS):
        row = measure(server, prompt, contender, size)
        latents = row.pop("latents")
        reference = reference or latents
        row = {**about, **row, "error": error(latents, reference)}
        row["latents_sha256"] = hashlib.sha256(latents).hexdigest()
        rows.append(row)
        print(line(row), flush=True)
    return {**about, "contenders": rows}


if __name__ == "__main__":
    sys.exit(main())
