"""Measures DeepCache's quality and speed with the demo's trained model in a real headless ComfyUI.

    python -m benchmarks.deepcache_quality --out docs/deepcache-quality.json --plot docs/deepcache-quality.svg
                                           [--cpu] [--size 256 256] [--batch 8] [--backend auto]

For 20 and for 50 steps: every interval, depth and schedule against the full model with the same captions and seeds.
Reports relative RMS of the latents, PSNR and SSIM of the images (means over all), full and fast passes (counted by the
node) and the seconds of sampling alone. For comparison also the full model with fewer steps, which needs no DeepCache.
`--plot` with `--from FILE` redraws a result. The scores need kornia, which ComfyUI installs.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.server.client import Client, execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .deepcache_plot import draw
from .rig import ROOT, environment, node, without_paths

INTERVALS, DEPTHS, SCHEDULES = (2, 3, 5, 10), (1, 2, 3), ("uniform", "non-uniform")
# Number of steps -> the shorter runs of the full model to compare with.
STEPS = {20: (16, 14, 12, 10, 8, 6), 50: (40, 30, 25, 20, 15, 10)}
CAPTIONS = (
    "large red circle left, white background",
    "small blue square right, grey background",
    "large green triangle top, black background",
    "large yellow diamond bottom, grey background",
    "large purple ring centre, white background",
    "large blue circle left, small red square right, white background",
    "small yellow triangle top, large purple cross bottom, black background",
    "large orange cross left, small green ring right, grey background",
)
CFG, SEED = 4.0, 7
Settings = dict[str, Any]


def prompt(caption: str, steps: int, settings: Settings | None, options: argparse.Namespace, seed: int) -> Any:
    """A prompt that saves latents; the model is compiled unless --backend is none. settings: of DeepCache, or None."""
    nodes: dict[str, Any] = {
        "load": node("ResoluteDemoModel"),
        "positive": node("CLIPTextEncode", clip=["load", 1], text=caption),
        "negative": node("CLIPTextEncode", clip=["load", 1], text=""),
        "latent": node(
            "EmptyLatentImage", width=options.size[0], height=options.size[1], batch_size=options.batch
        ),
    }  # fmt: skip
    model = ["load", 0]
    if options.backend != "none":
        nodes["compile"] = node("ResoluteCompileModel", model=model, backend=options.backend)
        model = ["compile", 0]
    if settings is not None:
        nodes["deepcache"] = node("ResoluteDeepCache", model=model, **settings)
        model = ["deepcache", 0]
    return rig.sampled(nodes, model, seed, steps, CFG)


def decoded(nodes: dict[str, Any]) -> dict[str, Any]:
    """The same prompt with images. If the prompt without them ran before, ComfyUI has the samples and only decodes."""
    return {
        **nodes,
        "decode": node("VAEDecode", samples=["sample", 0], vae=["load", 2]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="quality"),
    }


class Session:
    """Runs settings over all captions on one server."""

    def __init__(self, server: ComfyServer, options: argparse.Namespace) -> None:
        self._server, self._options = server, options
        self._client: Client = server.client

    def run(self, steps: int, settings: Settings | None) -> dict[str, Any]:
        """Sampling seconds per caption, passes, latents (images, 4, h, w) and images (images, h, w, 3)."""
        import numpy
        import torch
        from PIL import Image

        # Compile and capture before measuring: run the first and last caption with another seed.
        self._client.run(prompt(CAPTIONS[0], steps, settings, self._options, seed=SEED + 1000))
        self._client.run(prompt(CAPTIONS[-1], steps, settings, self._options, seed=SEED + 1000))
        log = len(self._server.log())
        seconds, latents, images = [], [], []
        for number, caption in enumerate(CAPTIONS):
            nodes = prompt(caption, steps, settings, self._options, seed=SEED + number)
            history = self._client.run(nodes)
            seconds.append(execution_seconds(history))
            latents += [numpy.load(io.BytesIO(file)) for file in self._client.images(history, "latents")]
            for file in self._client.images(self._client.run(decoded(nodes))):
                images.append(numpy.asarray(Image.open(io.BytesIO(file)).convert("RGB"), dtype="float32") / 255)
        return {
            "seconds": seconds,
            "passes": rig.passes(self._server.log()[log:]),
            "latents": torch.from_numpy(numpy.concatenate(latents)).double(),
            "images": torch.from_numpy(numpy.stack(images)),
        }


def scored(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Scores of a run against the reference: means over all images, and the values of each image."""
    from nodes.adapters.report.image_comparison import compare

    error = (run["latents"] - reference["latents"]).flatten(1).norm(dim=1)
    relative = (error / reference["latents"].flatten(1).norm(dim=1)).tolist()
    scores = compare(run["images"], reference["images"]).scores
    # Identical images have an infinite PSNR, which would make the mean infinite, so limit it.
    psnr = [min(score.psnr, 100.0) for score in scores]
    median, full = statistics.median(run["seconds"]), statistics.median(reference["seconds"])
    return {
        "seconds": run["seconds"],
        "median_seconds": median,
        "speedup": full / median,
        "passes": run["passes"],
        "latent_rms": statistics.mean(relative),
        "psnr": statistics.mean(psnr),
        "ssim": statistics.mean(score.ssim for score in scores),
        "each": {"latent_rms": relative, "psnr": psnr, "ssim": [score.ssim for score in scores]},
    }


def measure(session: Session, steps: int, intervals: list[int], depths: list[int], keep: Any) -> None:
    """Measure every setting at this number of steps; calls `keep` with each finished row."""
    reference = session.run(steps, None)
    # Repeat the reference to measure the difference between two equal runs.
    keep({"steps": steps, "kind": "full", "of": steps, **scored(session.run(steps, None), reference)})
    for fewer in STEPS[steps]:
        keep({"steps": steps, "kind": "fewer steps", "of": fewer, **scored(session.run(fewer, None), reference)})
    for schedule in SCHEDULES:
        for depth in depths:
            for interval in intervals:
                settings = {"interval": interval, "depth": depth, "schedule": schedule}
                scores = scored(session.run(steps, settings), reference)
                keep({"steps": steps, "kind": "deepcache", **settings, **scores})


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    what = f"{row['of']} steps, full" if "of" in row else "interval {interval}, depth {depth}, {schedule}".format(**row)
    passes = ", ".join(f"{p['full']}+{p['fast']}" for p in row["passes"])
    return (
        f"{row['steps']:>5}  {what:<38}{passes:>8}{row['median_seconds']:>9.3f}{row['speedup']:>8.2f}"
        f"{row['latent_rms']:>9.4f}{row['psnr']:>8.1f}{row['ssim']:>8.4f}"
    )


HEADER = f"{'steps':>5}  {'what':<38}{'passes':>8}{'seconds':>9}{'faster':>8}{'latents':>9}{'PSNR':>8}{'SSIM':>8}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the raw numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw them to this file, as SVG")
    parser.add_argument("--from", type=Path, dest="source", help="measure nothing and draw this result")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--size", type=int, nargs=2, default=(256, 256), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--batch", type=int, default=8, help="images per caption, in one prompt")
    parser.add_argument("--backend", default="auto", help="backend of Compile Model; none does not compile")
    parser.add_argument("--steps", type=int, nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--intervals", type=int, nargs="*", default=list(INTERVALS))
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    return parser.parse_args()


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server and measure everything; writes `--out` after every row."""
    setup = command.prepare()
    demo = {"resolute-demo": ROOT / "scripts" / "models" / "demo_model"}
    rows: list[dict[str, Any]] = []
    settings: Settings = {"size": list(options.size), "batch": options.batch, "cfg": CFG, "sampler": "euler, normal"}
    settings |= {"backend": options.backend, "captions": CAPTIONS, "arguments": without_paths(options.argument)}
    with (
        tempfile.TemporaryDirectory(prefix="resolute-quality-", ignore_cleanup_errors=True) as folder,
        rig.server(setup, Path(folder), options.argument, packs=demo, models=None, cpu=options.cpu) as server,
    ):
        result = {**environment(server), **({"gpu": None} if options.cpu else {}), **settings, "rows": rows}

        def keep(row: dict[str, Any]) -> None:
            rows.append(row)
            print(line(row), flush=True)
            rig.save(options.out, result)

        print(HEADER)
        for steps in options.steps:
            measure(Session(server, options), steps, options.intervals, options.depths, keep)
    return result


def main() -> int:
    options = parse()
    result = json.loads(options.source.read_text("utf-8")) if options.source else measure_all(options)
    if options.source:
        print("\n".join([HEADER, *map(line, result["rows"])]))
    if options.plot:
        options.plot.write_text(draw(result), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
