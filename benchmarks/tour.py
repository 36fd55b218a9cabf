"""Runs one checkpoint at many sizes, with stock ComfyUI and Resolute in the same server.

    python -m benchmarks.tour --kind sdxl --out benchmarks/results/NAME.json [--backends inductor cudagraph]
                              [--seconds 300] [--folder FOLDER] [--argument --disable-cuda-malloc ...] [--cpu]

For each size: three prompts per backend, then three with stock ComfyUI, with different seeds. Seconds are between
ComfyUI's start and end messages; `stall` is the time that the cache counted for compiling and capturing in the three;
`ms/step` is (20-step prompt - 1-step prompt) / 19. `--sampler lcm` takes 4 steps without guidance. A later run with the
same `--out` measures the sizes that it lacks. Needs CUDA and the environment of `scripts/test` (without a network, set
RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu` checks the script with a small model and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from scripts.models import generated
from scripts.server.client import Client, execution_seconds
from scripts.setup import command

from . import rig
from .cells import Cells, add_options, parts
from .rig import EULER, LCM, STOCK, Sampler, environment, prompt, without_paths

SAMPLERS = {each.name: each for each in (EULER, LCM)}
_TEXT = "a lighthouse"
# width, height, batch, text
TOURS: dict[str, list[tuple[int, int, int, str]]] = {
    "sdxl": [
        (1024, 1024, 1, _TEXT), (960, 720, 1, _TEXT), (896, 768, 1, _TEXT), (720, 720, 1, _TEXT),
        (1280, 1280, 1, _TEXT), (512, 2048, 1, _TEXT), (1024, 1024, 2, _TEXT), (1024, 1024, 1, f"{_TEXT} " * 60),
        (256, 256, 1, _TEXT),
    ],
    "sd15-mini": [(128, 128, 1, _TEXT), (96, 128, 2, _TEXT)],
    "sd15": [(512, 512, 1, _TEXT), (512, 512, 2, _TEXT), (720, 960, 1, _TEXT), (768, 512, 1, f"{_TEXT} " * 60)],
}  # fmt: skip


def measure(client: Client, make: Any, repeats: int) -> dict[str, Any]:
    """Run prompts with different seeds. Returns seconds, the latents of seed 1, and the increase of each counter."""
    before = rig.counters(client)
    histories = [client.run(make(seed=1 + run)) for run in range(repeats)]
    seconds = [execution_seconds(history) for history in histories]
    risen = rig.rise(before, rig.counters(client))
    return {"seconds": seconds, "counters": risen, "latents": rig.latents(client, histories[0])}


def visit(
    client: Client, checkpoint: str, size: tuple[int, int, int, str], backends: list[str], sampler: Sampler
) -> Iterator[dict[str, Any]]:
    """Measure one size: each backend, then stock. With stock come the errors of the latents against it."""
    row: dict[str, Any] = dict(zip(_KEY, key_of(size), strict=True))
    found: dict[str, Any] = {}  # latents

    def add(backend: str) -> None:
        def make(seed: int, steps: int) -> dict[str, Any]:
            return prompt(checkpoint, backend, size, steps, seed, sampler)

        result = measure(client, functools.partial(make, steps=sampler.steps), 3)
        short = measure(client, functools.partial(make, steps=1), 2)
        latents = found[backend] = result.pop("latents")
        steady = statistics.median(result["seconds"][1:])
        result["steady_seconds"] = steady
        result["first_extra_seconds"] = result["seconds"][0] - steady
        result["ms_per_step"] = 1000 * (steady - short["seconds"][-1]) / (sampler.steps - 1)
        result["one_step_seconds"] = short["seconds"][-1]
        result["finite"] = bool(numpy.isfinite(latents).all())
        row[backend] = result
        if backend == STOCK:
            for each, own in found.items():
                row[each]["latent_error"] = rig.error(own, latents)

    return parts(row, [*backends, STOCK], add)


_KEY = ("width", "height", "batch", "words")


def key_of(size: tuple[int, int, int, str]) -> tuple[int, ...]:
    """The entries that tell the row of a size from others."""
    return (*size[:3], len(size[3].split()))


def table(rows: list[dict[str, Any]], backends: list[str]) -> str:
    lines = [
        f"{'size':<14}{'b':>2} {'contender':<18}{'first':>7}{'steady':>8}{'ratio':>7}{'ms/step':>8}{'stall':>9}"
        f"{'compiles':>9}{'captures':>9}{'replays':>8}{'error':>9}"
    ]
    for row in rows:
        stock = row.get(STOCK, {}).get("steady_seconds", math.nan)  # of a part
        for name in [each for each in (STOCK, *backends) if each in row]:
            r = row[name]
            c = r["counters"]
            lines.append(
                f"{row['width']}x{row['height']:<9}{row['batch']:>2} {name:<18}{r['seconds'][0]:>7.2f}"
                f"{r['steady_seconds']:>8.2f}{stock / r['steady_seconds']:>7.2f}{r['ms_per_step']:>8.1f}"
                f"{c['stall_seconds']:>9.2f}{c['region_compiles']:>9}{c['captures']:>9}{c['replays']:>8}"
                f"{r.get('latent_error', math.nan):>9.1e} {c['bypasses'] or ''}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(TOURS), default="sdxl")
    parser.add_argument("--backends", nargs="*", default=["inductor", "cudagraph"])
    parser.add_argument("--sizes", type=int, default=99, help="visit only the first sizes of the tour")
    parser.add_argument("--sampler", choices=sorted(SAMPLERS), default="euler")
    add_options(parser, cpu="a small SD1.5")
    options = parser.parse_args()
    options.kind = "sd15-mini" if options.cpu else options.kind
    cells = Cells(options, lambda row: tuple(row[name] for name in _KEY))
    backends = ["inductor"] if options.cpu else options.backends
    wanted = [size for size in TOURS[options.kind][: options.sizes] if cells.lacks(key_of(size))]
    if wanted:
        run(wanted, backends, cells, options)
    print(table(cells.rows, backends))
    return 0


def run(wanted: list[Any], backends: list[str], cells: Cells, options: argparse.Namespace) -> None:
    """Measure these sizes in one server."""
    setup = command.prepare()
    path = generated.ensure(options.kind, setup.python, setup.comfyui)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-tour-"))
    server = rig.server(setup, folder, options.argument, cpu=options.cpu)
    with server:
        cells.about |= {**environment(server), "kind": options.kind, "arguments": without_paths(options.argument)}
        cells.about |= {"is_cpu": options.cpu, **SAMPLERS[options.sampler]._asdict()}
        try:
            # Load the model and run the process's first kernels before measuring.
            server.client.run(prompt(path.name, STOCK, TOURS[options.kind][0], seed=99))
            for size in wanted:
                name = f"{size[0]}x{size[1]} batch {size[2]}"
                given = (server.client, path.name, size, backends, SAMPLERS[options.sampler])
                row = cells.measure(name, functools.partial(visit, *given), 30)
                if row is not None:
                    print(table([row], backends), flush=True)
                    cells.save(cache=server.client.get("/resolute/cache"), **server.client.get("/resolute/events"))
        finally:
            print(f"server log: {server.log_path}")


if __name__ == "__main__":
    sys.exit(main())
