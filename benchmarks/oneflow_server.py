"""Measures the full SD1.5 architecture with OneFlow in a headless ComfyUI on the CPU: times, memory and errors.

    python -m benchmarks.oneflow_server --out benchmarks/results/FILE.json

Run it with the Python of `scripts/test --oneflow`. Random weights in float32, the bundled workflow; for each size one
eager prompt, one that builds graphs, and one that reuses them. Seconds are ComfyUI's, of a whole prompt. Needs about
20 GB of memory.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from compile_cache.backends.oneflow.packages import installed
from scripts.demonstration.plan import Job, prompt_for
from scripts.models import generated
from scripts.places import ROOT
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import comfyui, command
from tests.comfy.rig import Bench, Run, latent_error
from tests.comfy.test_workflows import saved

from . import rig

WORKFLOW = "oneflow_text_to_image"
# Width and height in pixels. The second has an odd latent, 19x17.
SIZES = [(128, 128), (152, 136)]
STEPS = 3
MIB = 1024 * 1024


def resident_mib(server: ComfyServer) -> int:
    assert server.process is not None
    pages = Path(f"/proc/{server.process.pid}/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") // MIB


def row(server: ComfyServer, checkpoint: str, size: tuple[int, int], seed: int) -> dict[str, Any]:
    """Run one size three times; the first two prompts have the same seed."""
    bench, job = Bench(server.client), Job(WORKFLOW, (size,))

    def run(backend: str | None, its_seed: int) -> Run:
        return bench.run(saved(prompt_for(job, checkpoint, backend, its_seed, STEPS)))

    eager = run("eager", seed)
    before = resident_mib(server)
    first, second = run(None, seed), run(None, seed + 1)
    assert first.rise["captures"] == 2, first.bypasses
    assert second.rise["captures"] == 0, second.bypasses
    return {
        "size": f"{size[0]}x{size[1]}",
        "eager_seconds": execution_seconds(eager.history),
        "first_seconds": execution_seconds(first.history),
        "second_seconds": execution_seconds(second.history),
        "build_seconds": first.rise["stall_seconds"],
        "replays_of_second": second.rise["replays"],
        "latent_error": latent_error(first.latents[0], eager.latents[0]),
        "image_error_of_255": int(abs(first.images[0] - eager.images[0]).max()),
        "resident_mib": {"before": before, "after": resident_mib(server)},
        "graphs_mib": server.client.get("/resolute/cache")["bytes"] // MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oneflow_server", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    python, target = Path(sys.executable), comfyui.ensure(ROOT, comfyui.TARGET)
    checkpoint = generated.ensure("sd15", python, target).name
    setup = command.Setup(python, {comfyui.TARGET: target})
    variables = {"RESOLUTE_BUDGET_MB": "16000", "RESOLUTE_STORE": "0"}
    packs = {"resolute-test-pack": ROOT / "tests" / "pack"}
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        rig.server(setup, Path(folder), ["--force-fp32"], packs=packs, cpu=True, environment=variables) as server,
    ):
        for number, size in enumerate(SIZES):
            rows.append(row(server, checkpoint, size, 100 * number))
            print(rows[-1], flush=True)
    document = {
        "machine": f"{os.cpu_count()}-core CPU, shared with other work",
        "comfyui": comfyui.TARGET,
        "torch": torch.__version__,
        "oneflow": installed(),
        "model": "SD1.5, 860 M parameters in the UNet, random weights, float32",
        "steps": STEPS,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    rig.save(options.out, document)


if __name__ == "__main__":
    main()
