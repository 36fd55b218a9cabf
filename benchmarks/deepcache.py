"""Measures DeepCache's speed: SDXL with random weights, stock ComfyUI, compiled, and compiled with DeepCache.

    python -m benchmarks.deepcache --out benchmarks/results/NAME.json [--backend auto] [--argument --ARG ...]

One server on ComfyUI's default command line. For each size and contender: warm-up prompts, then repetitions with
different seeds, first saving only latents, then also decoding and saving the image. Three times are reported:
*sampling*: the sampler alone, which is what DeepCache changes (see `stopwatch`), in prompts that save only latents;
*latents*: those whole prompts; *prompt*: the whole prompts with decoding; both by ComfyUI's start and end messages.
Needs CUDA and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.models import generated
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .rig import ROOT, STEPS, STOCK, environment, prompt, without_paths

KIND = "sdxl"
SIZES = ((1024, 1024), (720, 960))
COMPILED, CACHED, CACHED_ONLY = "compiled", "compiled + DeepCache", "DeepCache alone"
INTERVAL, DEPTH = 3, 2
WARM_UP, REPEATS = 2, 5
# Targets: speedup of sampling with DeepCache over compiled sampling without it, and over stock ComfyUI.
TARGETS = {COMPILED: 2.2, STOCK: 4.0}
_SAMPLED = re.compile(r"stopwatch: sampled for ([\d.]+) s")


def contender_prompt(checkpoint: str, name: str, backend: str, size: tuple[int, int], seed: int) -> dict[str, Any]:
    """The tour's prompt, with DeepCache before the sampler if the contender has it."""
    compiled = name in (COMPILED, CACHED)
    nodes = prompt(checkpoint, backend if compiled else STOCK, (*size, 1, "a lighthouse"), seed=seed)
    if name in (CACHED, CACHED_ONLY):
        source = nodes["sample"]["inputs"]["model"]
        nodes["deepcache"] = rig.node("ResoluteDeepCache", model=source, interval=INTERVAL, depth=DEPTH)
        nodes["sample"]["inputs"]["model"] = ["deepcache", 0]
    return nodes


def sampling_only(nodes: dict[str, Any]) -> dict[str, Any]:
    """The same prompt without decoding."""
    return {name: node for name, node in nodes.items() if name not in ("decode", "save", "compile_vae")}


def measure(server: ComfyServer, make: Any) -> dict[str, Any]:
    """All times, the increase of each counter, DeepCache's passes from its log lines, and the latents."""
    client = server.client
    before, log = rig.counters(client), len(server.log())
    seconds: dict[str, list[float]] = {}
    warm_up: dict[str, list[float]] = {}
    latents = None
    for kind, change in (("latents", sampling_only), ("prompt", dict)):
        offset = 0 if kind == "latents" else 100  # a repeated seed would be answered from ComfyUI's cache
        times = []
        for run in range(WARM_UP + REPEATS):
            history = client.run(change(make(seed=1 + offset + run)))
            times.append(execution_seconds(history))
            latents = rig.latents(client, history) if latents is None else latents
        warm_up[kind], seconds[kind] = times[:WARM_UP], times[WARM_UP:]
        if kind == "latents":
            sampled = [float(text) for text in _SAMPLED.findall(server.log()[log:])]
            assert len(sampled) == len(times), "one sampling run for each prompt"
            warm_up["sampling"], seconds["sampling"] = sampled[:WARM_UP], sampled[WARM_UP:]
    return {
        "warm_up_seconds": warm_up,
        "seconds": seconds,
        "median_seconds": {kind: statistics.median(times) for kind, times in seconds.items()},
        "counters": rig.rise(before, rig.counters(client)),
        "passes": rig.passes(server.log()[log:]),
        "latents": latents,
    }


def visit(
    server: ComfyServer, checkpoint: str, size: tuple[int, int], names: list[str], backend: str
) -> dict[str, Any]:
    """Measure all contenders at one size. `latent_error` says nothing about quality, because the weights are random."""
    import numpy

    row: dict[str, Any] = {"width": size[0], "height": size[1]}
    reference = None
    for name in names:
        result = measure(server, lambda seed, n=name: contender_prompt(checkpoint, n, backend, size, seed))
        latents = result.pop("latents")
        reference = latents if reference is None else reference
        result["latent_error"] = rig.error(latents, reference)
        result["finite"] = bool(numpy.isfinite(latents).all())
        row[name] = result
        print(_line(row, name), flush=True)
    return row


_HEADER = (
    f"{'size':<11}{'contender':<22}{'sampling s':>11}{'of':>9}{'prompt s':>10}{'stock/':>8}{'compiled/':>11}  passes"
)


def _line(row: dict[str, Any], name: str) -> str:
    result = row[name]
    median, times = result["median_seconds"], result["seconds"]["sampling"]
    ratios = [
        f"{row[other]['median_seconds']['sampling'] / median['sampling']:.2f}" if other in row else "-"
        for other in (STOCK, COMPILED)
    ]
    spread = f"{min(times):.3f}-{max(times):.3f}"
    passes = ", ".join(f"{p['full']} full {p['fast']} fast" for p in result["passes"])
    return (
        f"{row['width']}x{row['height']:<6}{name:<22}{median['sampling']:>8.3f}{spread:>14}{median['prompt']:>8.2f}"
        f"{ratios[0]:>8}{ratios[1]:>11}  {passes} {result['counters']['bypasses'] or ''}"
    )


def verdicts(row: dict[str, Any]) -> list[str]:
    """One sentence per target."""
    own = row[CACHED]["median_seconds"]["sampling"]
    lines = []
    for name, target in TARGETS.items():
        if name in row:
            ratio = row[name]["median_seconds"]["sampling"] / own
            word = "reached" if ratio >= target else "MISSED"
            lines.append(f"{row['width']}x{row['height']}: {ratio:.2f} times {name}; the target is {target}: {word}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backend", default="auto", help="backend of Compile Model and Compile VAE Decode")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--with-deepcache-alone", action="store_true", help="also DeepCache without Compile Model")
    parser.add_argument("--folder", type=Path, help="the server's folder, with its files and log")
    options = parser.parse_args()
    setup = command.prepare()
    path = generated.ensure(KIND, setup.python, setup.comfyui)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-deepcache-"))
    stopwatch = {"resolute-stopwatch": ROOT / "benchmarks" / "stopwatch"}
    server = rig.server(setup, folder, options.argument, packs=stopwatch)
    names = [STOCK, COMPILED, CACHED, *([CACHED_ONLY] if options.with_deepcache_alone else [])]
    settings = {"interval": INTERVAL, "depth": DEPTH, "steps": STEPS, "backend": options.backend}
    rows: list[dict[str, Any]] = []
    with server:
        about = {**environment(server), "kind": KIND, "arguments": without_paths(options.argument), **settings}
        # Load the model and run the process's first kernels before measuring.
        server.client.run(contender_prompt(path.name, STOCK, options.backend, SIZES[0], seed=99))
        print(_HEADER)
        for size in SIZES:
            rows.append(visit(server, path.name, size, names, options.backend))
            result = {**about, "rows": rows, "cache": server.client.get("/resolute/cache")}
            rig.save(options.out, result)
    print(f"server log: {server.log_path}\n\n{_HEADER}")
    for row in rows:
        print("\n".join(_line(row, name) for name in names))
    print("\n".join(line for row in rows for line in verdicts(row)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
