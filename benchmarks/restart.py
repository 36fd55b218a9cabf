"""Measures a restart: the first prompts of a process with stored compiled code, and of one without.

    python -m benchmarks.restart --kind sdxl --out benchmarks/results/NAME.json [--contenders resolute ...]
                                 [--seconds 200] [--folder FOLDER] [--cpu]

For each contender, two processes run the same sizes. The first starts with empty caches; the second finds what the
first stored: Resolute its store (inductor's cache is emptied in between); Resolute without a store and core's
TorchCompileModel inductor's cache. The second process also runs one size that the first did not. Seconds are between
ComfyUI's start and end messages of a prompt. Each size runs twice with different seeds; the extra time of the first run
is the stall. Before the first prompt the server is idle for as long as opening the page in a browser takes (--pause),
and Resolute preloads regions in that time. The first prompt also loads the checkpoint, so compare with stock ComfyUI.
Resolute compiles the VAE decoder too, TorchCompileModel only the diffusion model. A later run with the same `--out`
measures the contenders that it lacks, each with both processes. Needs CUDA; see `benchmarks.tour`.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.models import generated
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .cells import Cells, add_options, parts
from .rig import STOCK, environment, prompt, without_paths
from .tour import TOURS

WITHOUT_STORE = "resolute without store"
CONTENDERS = {"resolute": "inductor", STOCK: STOCK, WITHOUT_STORE: "inductor", "TorchCompileModel": "TorchCompileModel"}


def visit(server: ComfyServer, checkpoint: str, backend: str, sizes: list[Any]) -> Iterator[dict[str, Any]]:
    """Run each size twice: the first time and again. Yields seconds and the increase of each counter."""
    client = server.client
    for size in sizes:
        before = rig.counters(client)
        seconds = [execution_seconds(client.run(prompt(checkpoint, backend, size, seed=seed))) for seed in (1, 2)]
        risen = rig.rise(before, rig.counters(client))
        yield {"width": size[0], "height": size[1], "batch": size[2], "seconds": seconds, "counters": risen}


def measure(
    contender: str, setup: command.Setup, checkpoint: str, options: argparse.Namespace, about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The row of a contender, after each of its two processes. about: gets what a server says of its machine."""
    tour = TOURS[options.kind]
    sizes, new = tour[: options.sizes], tour[options.sizes : options.sizes + 1]
    work = options.folder or Path(tempfile.mkdtemp(prefix="resolute-restart-"))
    place = work / contender.replace(" ", "-")
    shutil.rmtree(place, ignore_errors=True)
    row: dict[str, Any] = {"contender": contender, "processes": []}

    def add(process: str) -> None:
        if contender == "resolute":
            shutil.rmtree(place / "inductor", ignore_errors=True)
        store = "0" if contender == WITHOUT_STORE else str(place / "store")
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TRITON_CACHE_DIR": None}
        variables = {**caches, "RESOLUTE_STORE": store}
        server = rig.server(setup, place / process, options.argument, environment=variables, cpu=options.cpu)
        started = time.perf_counter()
        with server:
            ready = time.perf_counter() - started
            time.sleep(options.pause)
            about.update(environment(server))
            visited = sizes if process == "cold" else [*sizes, *new]
            rows = list(visit(server, checkpoint, CONTENDERS[contender], visited))
            entry = {"contender": contender, "process": process, "ready_seconds": ready, "rows": rows}
            row["processes"].append(entry | server.client.get("/resolute/events"))

    yield from parts(row, ("cold", "restart"), add)
    if not options.folder:
        shutil.rmtree(work, ignore_errors=True)


def table(processes: list[dict[str, Any]]) -> str:
    lines = []
    for each in processes:
        sizes = "  ".join(
            f"{row['width']}x{row['height']}: {row['seconds'][0]:6.2f} (then {row['seconds'][1]:5.2f})"
            for row in each["rows"]
        )
        risen = [row["counters"] for row in each["rows"]]
        compiles, loads = (sum(row[name] for row in risen) for name in ("region_compiles", "region_loads"))
        lines.append(f"{each['contender']:<24}{each['process']:<9}{sizes}  compiles {compiles} loads {loads}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(TOURS), default="sdxl")
    parser.add_argument("--contenders", nargs="*", choices=sorted(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--sizes", type=int, default=3, help="visit only the first sizes of the tour")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds before a server's first prompt")
    add_options(parser, cpu="a small SD1.5")
    options = parser.parse_args()
    options.kind = "sd15-mini" if options.cpu else options.kind
    cells = Cells(options, lambda row: row["contender"])
    setup = command.prepare()
    path = generated.ensure(options.kind, setup.python, setup.comfyui)
    cells.about |= {"kind": options.kind, "arguments": without_paths(options.argument), "pause": options.pause}
    cells.about["is_cpu"] = options.cpu
    for contender in options.contenders:
        if cells.lacks(contender):
            given = (contender, setup, path.name, options, cells.about)
            row = cells.measure(contender, functools.partial(measure, *given), 60)
            if row is not None:
                print(table(row["processes"]), flush=True)
    print(table([process for row in cells.rows for process in row["processes"]]))


if __name__ == "__main__":
    main()
