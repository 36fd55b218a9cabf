"""Measures how far half precision moves the latents of the fuzzer's tiny model, with Resolute and without.

    python -m benchmarks.half_precision [--bf16] [--precision-casts] [--cpu] [--seconds 300] [--out FILE]

For each workflow and seed four prompts in one server: ComfyUI's own in float16, the same through `inductor` and through
`cudagraph`, and a reference that computes in float32 with the same float16 weights (core's ModelComputeDtype). Errors
are norms relative to the reference, or to ComfyUI's own. The last lines say for each backend how many times ComfyUI's
own error to the reference its error is: the most of all cases. Takes two minutes on a GPU; `--cpu` computes in float16
on the CPU and leaves out `cudagraph`. `--bf16`: bfloat16 in place of float16. `--precision-casts`: inductor rounds
where ComfyUI's own kernels do. Each case is written at once, and a later run with the same `--out` measures those that
the file lacks, by dtype and rounding. Needs the environment of `scripts/test`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.places import ROOT
from scripts.setup import command
from tests.comfy.fuzz import loras
from tests.comfy.fuzz.prompts import in_float32, ours, plain
from tests.comfy.fuzz.workflow import Workflow
from tests.comfy.rig import Bench, Run, latent_error

from . import rig
from .cells import NO_LIMIT, Cells

PRECISION_CASTS = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"
WORKFLOWS = {
    "default": Workflow(),
    "one step": Workflow(steps=1),
    "256x256, batch 2": Workflow(width=256, height=256, batch=2),
    "sdxl": Workflow(kind="sdxl"),
    "without guidance": Workflow(cfg=1.0),
}


def errors(bench: Bench, workflow: Workflow, backends: list[str]) -> dict[str, float]:
    """The errors of one workflow."""
    own, again, exact = (bench.run(prompt) for prompt in (plain(workflow), plain(workflow, 1), in_float32(workflow)))
    found = {"own again to own": _error(again, own), "own to float32": _error(own, exact)}
    for number, backend in enumerate(backends):
        run = bench.run(ours(workflow, backend, 2 + number))
        found |= {f"{backend} to own": _error(run, own), f"{backend} to float32": _error(run, exact)}
    return found


def _error(run: Run, reference: Run) -> float:
    return float(f"{latent_error(run.latents[0], reference.latents[0]):.3g}")


def worst_ratios(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By dtype and backend, the most that an error to float32 is of ComfyUI's own in the same case."""
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        found = worst.setdefault(f"{row['dtype']}{', precision casts' if row['precision_casts'] else ''}", {})
        for name in row:
            backend, _, to = name.partition(" to ")
            if to == "float32" and backend != "own":
                ratio = round(row[name] / row["own to float32"], 2)
                found[backend] = max(found.get(backend, 0.0), ratio)
    return worst


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["case"], row["dtype"], row["precision_casts"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--precision-casts", action="store_true", help=f"set {PRECISION_CASTS}=1")
    parser.add_argument("--seconds", type=float, default=NO_LIMIT, help="begin no case that would end later")
    parser.add_argument("--out", type=Path, help="the results; a later run with this file measures what it lacks")
    options = parser.parse_args()
    kind = {"dtype": "bfloat16" if options.bf16 else "float16", "precision_casts": options.precision_casts}
    cases = {
        f"{name}, seed {seed}": dataclasses.replace(WORKFLOWS[name], seed=seed)
        for name in WORKFLOWS
        for seed in (1, 2, 3)
    }
    cells = Cells(options, _cell)
    wanted = [case for case in cases if cells.lacks((case, *kind.values()))]
    if wanted:
        _measure(options, cells, kind, {case: cases[case] for case in wanted})
    ratios = worst_ratios(cells.rows)
    cells.save(worst_ratios=ratios)
    for name, found in ratios.items():
        print(f"{name}: the error to float32 is at most so many times ComfyUI's own: {found}", flush=True)
    return 1 if cells.failed else 0


def _measure(options: argparse.Namespace, cells: Cells, kind: dict[str, Any], cases: Mapping[str, Workflow]) -> None:
    arguments = ["--bf16-unet" if options.bf16 else "--fp16-unet"]
    variables = {"RESOLUTE_STORE": "0", PRECISION_CASTS: str(int(options.precision_casts))}
    backends = ["inductor"] if options.cpu else ["inductor", "cudagraph"]
    packs = {"resolute-test-pack": ROOT / "tests" / "pack"}
    with (
        tempfile.TemporaryDirectory(prefix="resolute-half-", ignore_cleanup_errors=True) as folder,
        rig.server(
            command.prepare(), Path(folder), arguments, packs=packs, cpu=options.cpu, environment=variables
        ) as server,
    ):
        loras.write(server.folder / "models" / "loras")
        cells.about |= rig.environment(server)
        bench = Bench(server.client)

        def measure(case: str) -> dict[str, Any]:
            return {"case": case, **kind, **errors(bench, cases[case], backends)}

        for case in cases:
            row = cells.measure(case, functools.partial(measure, case), 20)
            if row is not None:
                print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
