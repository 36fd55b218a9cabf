"""Measures how far half precision moves the latents of the fuzzer's tiny model, with Resolute and without.

    python -m benchmarks.half_precision [--bf16] [--precision-casts] [--cpu] [--out FILE]

For each workflow and seed four prompts in one server: ComfyUI's own in float16, the same through `inductor` and through
`cudagraph`, and a reference that computes in float32 with the same float16 weights (core's ModelComputeDtype). Errors
are norms relative to the reference, or to ComfyUI's own. Takes two minutes on a GPU; `--cpu` computes in float16 on the
CPU and leaves out `cudagraph`. `--bf16`: bfloat16 in place of float16. `--precision-casts`: inductor rounds where
ComfyUI's own kernels do. Needs the environment of `scripts/test`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.places import ROOT
from scripts.setup import comfyui, command
from tests.comfy.fuzz import loras
from tests.comfy.fuzz.prompts import in_float32, ours, plain
from tests.comfy.fuzz.workflow import Workflow
from tests.comfy.rig import Bench, Run, latent_error

from . import rig

PRECISION_CASTS = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"
WORKFLOWS = {
    "default": Workflow(),
    "one step": Workflow(steps=1),
    "256x256, batch 2": Workflow(width=256, height=256, batch=2),
    "sdxl": Workflow(kind="sdxl"),
    "without guidance": Workflow(cfg=1.0),
}


def row(bench: Bench, workflow: Workflow, backends: list[str]) -> dict[str, float]:
    """The errors of one workflow."""
    own, again, exact = (bench.run(prompt) for prompt in (plain(workflow), plain(workflow, 1), in_float32(workflow)))
    errors = {"own again to own": _error(again, own), "own to float32": _error(own, exact)}
    for number, backend in enumerate(backends):
        run = bench.run(ours(workflow, backend, 2 + number))
        errors |= {f"{backend} to own": _error(run, own), f"{backend} to float32": _error(run, exact)}
    return errors


def _error(run: Run, reference: Run) -> float:
    return float(f"{latent_error(run.latents[0], reference.latents[0]):.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.half_precision", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--precision-casts", action="store_true", help=f"set {PRECISION_CASTS}=1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = comfyui.ensure(ROOT, comfyui.TARGET)
    setup = command.Setup(Path(sys.executable), {comfyui.TARGET: target})
    packs = {"resolute-test-pack": ROOT / "tests" / "pack"}
    arguments = ["--bf16-unet" if options.bf16 else "--fp16-unet"]
    variables = {"RESOLUTE_STORE": "0", PRECISION_CASTS: str(int(options.precision_casts))}
    backends = ["inductor"] if options.cpu else ["inductor", "cudagraph"]
    with (
        tempfile.TemporaryDirectory() as folder,
        rig.server(setup, Path(folder), arguments, packs=packs, cpu=options.cpu, environment=variables) as server,
    ):
        loras.write(server.folder / "models" / "loras")
        bench = Bench(server.client)
        rows: dict[str, Any] = {}
        for name, workflow in WORKFLOWS.items():
            for seed in (1, 2, 3):
                case = f"{name}, seed {seed}"
                rows[case] = row(bench, dataclasses.replace(workflow, seed=seed), backends)
                print(case, rows[case], flush=True)
        stats = server.client.get("/system_stats")
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "devices": [device["name"] for device in stats["devices"]],
        "torch": stats["system"]["pytorch_version"],
        "comfyui": comfyui.TARGET,
        "dtype": "bfloat16" if options.bf16 else "float16",
        "precision_casts": options.precision_casts,
        "rows": rows,
    }
    rig.save(options.out, document)


if __name__ == "__main__":
    main()
