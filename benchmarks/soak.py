"""Runs hundreds of random prompts with Resolute in one server, and watches memory, compiles and errors.

    python -m benchmarks.soak --out benchmarks/results/NAME-soak.json [--prompts 500] [--free 12] [--budget-mb 10]
                              [--steps 6] [--every 25] [--shapes 40] [--seconds 500] [--contender stock]
                              [--folder FOLDER] [--argument ...] [--cpu]

Two checkpoints (SDXL and SD1.5, random weights), sizes and batches of a seeded random trace, and LoRAs that are added
and removed. After each prompt it reads the memory in use on the device and in the server's process. Slopes are of the
second half, in MiB per 100 prompts, with standard errors; each checkpoint has its own level. ComfyUI caches results of
nodes, so compare the host's slope with that of `--contender stock`. One prompt in `--every` runs again with stock
ComfyUI and the same seed, and the latents are compared. The default budget is enough for about a tenth of the captures.
All prompts run in one server, so a later run starts over; when `--seconds` are over, the run ends with its results so
far. Needs CUDA and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu`
checks the script with a small model and no LoRA.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import psutil

from scripts.errors import PromptError
from scripts.models import generated
from scripts.server.client import Client, execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command
from tests.comfy.random_visits import Visit, trace

from . import rig
from .cells import add_options
from .random_lora import write_lora

MIB = 1 << 20
LORAS = "ab"  # as a trace names them


def slope(values: Sequence[float], kinds: Sequence[str]) -> tuple[float, float]:
    """The slope of values per 100 steps, and its standard error, by least squares with a level for each kind."""
    x, y = numpy.arange(len(values)) / 100, numpy.asarray(values, numpy.float64)
    for kind in set(kinds):
        mine = numpy.asarray(kinds) == kind
        x[mine] -= x[mine].mean()
        y[mine] -= y[mine].mean()
    squares = float(x @ x)
    rise = float(x @ y) / squares
    rest = y - rise * x
    variance = float(rest @ rest) / max(len(values) - len(set(kinds)) - 1, 1)
    return rise, (variance / squares) ** 0.5


def summary(rows: Sequence[dict[str, Any]], first_of: Sequence[int]) -> dict[str, Any]:
    """The result of a run. first_of: the numbers of the prompts that may compile: the first of each kind."""
    half = rows[len(rows) // 2 :]
    found: dict[str, Any] = {"prompts": len(rows)}
    for name in ("device_mib", "host_mib"):
        rise, spread = slope([row[name] for row in half], [row["kind"] for row in half])
        found[f"{name}_per_100_prompts"] = {"slope": round(rise, 2), "standard_error": round(spread, 2)}
    later = [row for number, row in enumerate(rows) if number not in first_of]
    found["compiles_after_the_first"] = sum(row["region_compiles"] for row in later)
    found["captures"] = sum(row["captures"] for row in rows)
    found["evictions"] = sum(row["evictions"] for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    found |= {"compared": len(errors), "worst_error": max(errors, default=None)}
    return found


def run(client: Client, visit: Visit, contender: str, steps: int, files: dict[str, str]) -> dict[str, Any]:
    """Run one prompt. Returns its seconds, its latents, and the increase of the counters."""
    size = (visit.width, visit.height, visit.batch, "a lighthouse")
    nodes = rig.prompt(files[visit.kind], size, steps, visit.seed)
    if visit.lora:
        nodes = rig.with_lora(nodes, f"bench-{visit.lora}.safetensors", visit.strength)
    if contender == rig.OURS:
        nodes = rig.compiled(nodes, "inductor")
    before = rig.counters(client)
    history = client.run(nodes)
    risen = rig.rise(before, rig.counters(client))
    names = ("captures", "replays", "region_compiles", "evictions", "bypasses")
    counted = {name: risen[name] for name in names}
    found = {"seconds": execution_seconds(history), "stall": risen["stall_seconds"], **counted}
    return {**found, "latents": rig.latents(client, history)}


def measure(
    server: ComfyServer, files: dict[str, str], options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """Run the trace until the deadline. Yields a row for each prompt."""
    from .card_memory import used_bytes

    assert server.process is not None
    process = psutil.Process(server.process.pid)
    sides = range(64, 193, 64) if options.cpu else range(512, 1281, 64)
    longest = 0.0
    for number, visit in enumerate(trace(options.prompts, list(files), sides, options.shapes)):
        begun = time.monotonic()
        if begun + longest > deadline:
            print(f"{options.seconds:.0f} s are over after {number} prompts", flush=True)
            return
        visit = replace(visit, lora="") if options.cpu else visit
        try:
            found = run(server.client, visit, options.contender, options.steps, files)
        except PromptError as error:  # record it as a result; the server keeps running
            yield {**asdict(visit), "failed": str(error)[:500]}
            continue
        latents = found.pop("latents")
        row: dict[str, Any] = {
            **asdict(visit),
            **found,
            "device_mib": used_bytes() // MIB,
            "host_mib": process.memory_info().rss // MIB,
        }
        if options.contender == rig.OURS and number % options.every == options.every - 1:
            stock = run(server.client, visit, rig.STOCK, options.steps, files)["latents"]
            row["error"] = rig.error(latents, stock)
        shown = f"{visit.width}x{visit.height} batch {visit.batch}, {row['seconds']:.2f} s, {row['device_mib']} MiB"
        print(f"{number:4} {visit.kind} {shown} {row['bypasses'] or ''}", flush=True)
        longest = max(longest, time.monotonic() - begun)
        yield row


def keep(out: Path | None, result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the rows so far and their summary."""
    first_of = [next(n for n, row in enumerate(rows) if row["kind"] == kind) for kind in {r["kind"] for r in rows}]
    result |= {"summary": summary(rows, first_of) if len(rows) > 4 else {}, "rows": rows}
    rig.save(out, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--shapes", type=int, default=40, help="of each model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=25, help="compare one of so many prompts with stock ComfyUI")
    parser.add_argument("--free", type=float, help="GiB of the card that are free")
    parser.add_argument("--budget-mb", type=int, default=10)
    parser.add_argument("--contender", choices=(rig.OURS, rig.STOCK), default=rig.OURS)
    add_options(parser, cpu="a small SD1.5")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    from .card_memory import small_card, used_bytes

    setup = command.prepare()
    kinds = ("sd15-mini",) if options.cpu else ("sdxl", "sd15")
    paths = {kind: generated.ensure(kind, setup.python, setup.comfyui) for kind in kinds}
    for seed, name in enumerate("" if options.cpu else LORAS):
        write_lora(paths["sdxl"], generated.folder() / "loras" / f"bench-{name}.safetensors", seed)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-soak-"))
    budget = {"RESOLUTE_BUDGET_MB": str(options.budget_mb)}
    server = rig.server(setup, folder, options.argument, environment=budget, cpu=options.cpu)
    result: dict[str, Any] = {"arguments": rig.without_paths(options.argument), "free_gib": options.free}
    result |= {"contender": options.contender, "steps": options.steps}
    result |= {"budget_mib": options.budget_mb, "is_cpu": options.cpu}
    rows: list[dict[str, Any]] = []
    errors = result["errors"] = list[dict[str, Any]]()
    used_bytes()  # create this process's CUDA context, which then counts in each measurement
    with small_card(options.free), server:
        result |= rig.environment(server)
        try:
            for row in measure(server, {kind: path.name for kind, path in paths.items()}, options, deadline):
                (errors if "failed" in row else rows).append(row)
                keep(options.out, result, rows)
        finally:  # an interrupted run keeps its results
            keep(options.out, result, rows)
    print(json.dumps(result["summary"], indent=1), *(error["failed"] for error in errors), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
