"""Runs one checkpoint at many sizes, with stock ComfyUI and Resolute in the same server.

    python -m benchmarks.tour --kind sdxl --out benchmarks/results/NAME.json [--backends inductor cudagraph]
                              [--argument --disable-cuda-malloc ...]

For each size: three prompts with stock ComfyUI, then three per backend, with different seeds. Seconds are between
ComfyUI's start and end messages; `stall` is the time that the cache counted for compiling and capturing in the three;
`ms/step` is (20-step prompt - 1-step prompt) / 19. Needs CUDA and the environment of `scripts/test` (without a network,
set RESOLUTE_PYTHON and COMFYUI_PATH).
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.models import generated
from scripts.server.client import Client, execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

ROOT = Path(__file__).resolve().parent.parent
STOCK = "stock"
STEPS = 20

# width, height, batch, text
TOURS: dict[str, list[tuple[int, int, int, str]]] = {
    "sdxl": [
        (1024, 1024, 1, "a lighthouse"),
        (960, 720, 1, "a lighthouse"),
        (896, 768, 1, "a lighthouse"),
        (720, 720, 1, "a lighthouse"),
        (1280, 1280, 1, "a lighthouse"),
        (512, 2048, 1, "a lighthouse"),
        (1024, 1024, 2, "a lighthouse"),
        (1024, 1024, 1, "a lighthouse " * 60),
        (256, 256, 1, "a lighthouse"),
    ],
    "sd15": [
        (512, 512, 1, "a lighthouse"),
        (512, 512, 2, "a lighthouse"),
        (720, 960, 1, "a lighthouse"),
        (768, 512, 1, "a lighthouse " * 60),
    ],
}


def prompt(
    checkpoint: str, backend: str, size: tuple[int, int, int, str], steps: int = STEPS, seed: int = 1
) -> dict[str, Any]:
    """Text to image with core's nodes; adds Resolute's nodes or TorchCompileModel unless `backend` is stock."""
    width, height, batch, text = size
    model, vae = ["load", 0], ["load", 2]
    nodes: dict[str, Any] = {
        "load": _node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "positive": _node("CLIPTextEncode", clip=["load", 1], text=text),
        "negative": _node("CLIPTextEncode", clip=["load", 1], text="blurry"),
        "latent": _node("EmptyLatentImage", width=width, height=height, batch_size=batch),
    }
    if backend == "TorchCompileModel":
        nodes["compile"] = _node("TorchCompileModel", model=model, backend="inductor")
        model = ["compile", 0]
    elif backend != STOCK:
        nodes["compile"] = _node("ResoluteCompileModel", model=model, backend=backend)
        nodes["compile_vae"] = _node("ResoluteCompileVAEDecode", vae=vae, backend=backend)
        model, vae = ["compile", 0], ["compile_vae", 0]
    nodes["sample"] = _node(
        "KSampler", model=model, seed=seed, steps=steps, cfg=7.0, sampler_name="euler", scheduler="normal",
        positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0], denoise=1.0,
    )  # fmt: skip
    nodes["decode"] = _node("VAEDecode", samples=["sample", 0], vae=vae)
    nodes["save"] = _node("SaveImage", images=["decode", 0], filename_prefix="tour")
    nodes["latents"] = _node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="tour")
    return nodes


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def measure(client: Client, make: Any, repeats: int) -> dict[str, Any]:
    """Run prompts with different seeds. Returns seconds, the latents of seed 1, and the increase of each counter."""
    before = client.get("/resolute/cache")["counters"]
    seconds, latents = [], None
    for run in range(repeats):
        history = client.run(make(seed=1 + run))
        seconds.append(execution_seconds(history))
        if latents is None:
            latents = client.images(history, "latents")
    after = client.get("/resolute/cache")["counters"]
    moved = {key: after[key] - before[key] for key in after if key != "bypasses"}
    moved["bypasses"] = {key: n - before["bypasses"].get(key, 0) for key, n in after["bypasses"].items()}
    return {"seconds": seconds, "counters": moved, "latents": latents}


def visit(client: Client, checkpoint: str, size: tuple[int, int, int, str], backends: list[str]) -> dict[str, Any]:
    """Measure one size: stock, then each backend with the error of its latents against stock."""
    import numpy

    def load(files: list[bytes]) -> Any:
        return numpy.concatenate([numpy.load(io.BytesIO(file)).ravel() for file in files]).astype("float64")

    row: dict[str, Any] = {"width": size[0], "height": size[1], "batch": size[2], "words": len(size[3].split())}
    reference = None
    for backend in [STOCK, *backends]:
        result = measure(client, lambda seed, b=backend: prompt(checkpoint, b, size, seed=seed), 3)
        short = measure(client, lambda seed, b=backend: prompt(checkpoint, b, size, steps=1, seed=seed), 2)
        latents = load(result.pop("latents"))
        reference = latents if reference is None else reference
        steady = statistics.median(result["seconds"][1:])
        result["steady_seconds"] = steady
        result["first_extra_seconds"] = result["seconds"][0] - steady
        result["ms_per_step"] = 1000 * (steady - short["seconds"][-1]) / (STEPS - 1)
        result["one_step_seconds"] = short["seconds"][-1]
        result["latent_error"] = float(numpy.linalg.norm(latents - reference) / numpy.linalg.norm(reference))
        result["finite"] = bool(numpy.isfinite(latents).all())
        row[backend] = result
    return row


def environment(server: ComfyServer) -> dict[str, Any]:
    stats = server.client.get("/system_stats")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    has_gpu = shutil.which(query[0]) is not None
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if has_gpu else "none"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu,
        "devices": stats.get("devices"),
        "system": {key: stats["system"].get(key) for key in ("comfyui_version", "python_version", "pytorch_version")},
    }


def without_paths(arguments: list[str]) -> list[str]:
    """ComfyUI's arguments for the result file, with FOLDER in place of this machine's paths."""
    return ["FOLDER" if Path(argument).is_absolute() else argument for argument in arguments]


def table(rows: list[dict[str, Any]], backends: list[str]) -> str:
    lines = [
        f"{'size':<14}{'b':>2} {'contender':<18}{'first':>7}{'steady':>8}{'ratio':>7}{'ms/step':>8}{'stall':>9}"
        f"{'compiles':>9}{'captures':>9}{'replays':>8}{'error':>9}"
    ]
    for row in rows:
        stock = row[STOCK]["steady_seconds"]
        for name in [STOCK, *backends]:
            r = row[name]
            c = r["counters"]
            lines.append(
                f"{row['width']}x{row['height']:<9}{row['batch']:>2} {name:<18}{r['seconds'][0]:>7.2f}"
                f"{r['steady_seconds']:>8.2f}{stock / r['steady_seconds']:>7.2f}{r['ms_per_step']:>8.1f}"
                f"{c['stall_seconds']:>9.2f}{c['region_compiles']:>9}{c['captures']:>9}{c['replays']:>8}"
                f"{r['latent_error']:>9.1e} {c['bypasses'] or ''}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(TOURS), default="sdxl")
    parser.add_argument("--backends", nargs="*", default=["inductor", "cudagraph"])
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--sizes", type=int, default=99, help="visit only the first sizes of the tour")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="the server's folder, with its files and log")
    options = parser.parse_args()
    setup = command.prepare()
    path = generated.ensure(options.kind, setup.python, setup.comfyui)
    packs = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack"}
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-tour-"))
    server = ComfyServer(
        setup.python,
        setup.comfyui,
        folder,
        packs=packs,
        models=generated.folder(),
        cpu=False,
        arguments=options.argument,
    )
    rows: list[dict[str, Any]] = []
    with server:
        about = {**environment(server), "kind": options.kind, "arguments": without_paths(options.argument)}
        try:
            # Load the model and run the process's first kernels before measuring.
            server.client.run(prompt(path.name, STOCK, TOURS[options.kind][0], seed=99))
            for size in TOURS[options.kind][: options.sizes]:
                rows.append(visit(server.client, path.name, size, options.backends))
                print(table(rows[-1:], options.backends), flush=True)
                result = {**about, "steps": STEPS, "rows": rows}
                result |= {"cache": server.client.get("/resolute/cache"), **server.client.get("/resolute/events")}
                if options.out:  # write after every size, so that an interrupted run has results
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
        finally:
            log = folder / "server.log"
            log.write_text(server.log())
            print(f"server log: {log}")
    print(table(rows, options.backends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
