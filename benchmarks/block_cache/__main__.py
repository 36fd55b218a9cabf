"""Trains a small diffusion transformer, then compares ways to spend less on its steps, at equal cost.

    COMFYUI_PATH=... python -m benchmarks.block_cache --out benchmarks/results/NAME-block-cache.json --weights FILE

For 20, 28 and 50 steps: fewer steps, core's EasyCache, a fixed schedule of full passes and schedules planned on one
full run of another seed, for several numbers of first and last blocks. 8 seeds with two captions each; every picture
is compared with its own full run: PSNR, and a distance of the transformer's own features. `seconds` are measured
around each run; `model_seconds` count passes times the time of one pass, so that the host costs nobody anything.
`plain` is the verdict: the planned schedules' lead in dB over the better of fewer steps and EasyCache, at equal cost.
Trains for --minutes, unless FILE exists. Needs CUDA for times that mean something; --quick tries all of it on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import schedules, verdict
from .passes import Passes, Predict, noise, sample, scheduled
from .pictures import captions
from .transformer import DEPTH, FIELDS, TOKENS, WIDTH, Transformer, no_caption, train

SEEDS, CAPTIONS, CALIBRATION = tuple(range(100, 108)), 2, 7
BLOCKS = ((2, 1), (1, 0), (0, 0))  # of a fast pass, at the beginning and at the end
STEPS = (28, 50, 20)
BUDGETS = tuple(n / 20 for n in range(3, 18))  # share of steps, or of full passes
THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5)  # of EasyCache
FEATURE_BLOCKS = (3, 7, 11)


class Comparison:
    """Runs every picture in every way and scores it against its full run."""

    def __init__(self, model: Transformer, device: str, seeds: tuple[int, ...], per_seed: int) -> None:
        self._model, self._device = model, device
        generator = torch.Generator(device).manual_seed(99)
        self._caption = captions(len(seeds) * per_seed + 1, generator)
        self._starts = {(seed, n): noise(seed * 10 + n, 1, device) for seed in seeds for n in range(per_seed)}
        self.calibration = noise(CALIBRATION, 1, device)
        self._passes: dict[tuple[int, int], Passes] = {}
        self._full: dict[tuple[int, int], torch.Tensor] = {}
        self._per_seed, self._seeds = per_seed, seeds

    def passes(self, blocks: tuple[int, int]) -> Passes:
        """The passes for so many blocks, set to the calibration's caption."""
        if blocks not in self._passes:
            self._passes[blocks] = Passes(self._model, self._caption[-1:], *blocks, self._device)
        self._passes[blocks].reset(self._caption[-1:])
        return self._passes[blocks]

    def pass_seconds(self, blocks: tuple[int, int]) -> tuple[float, float]:
        """Seconds of a full and of a fast pass: the median of 30 replays."""
        passes, x, t = self.passes(blocks), torch.cat([self.calibration] * 2), torch.ones((), device=self._device)
        found = []
        for is_full in (True, False):
            times = [self._timed(lambda f=is_full: passes.run(x, t, f))[0] for _ in range(30)]  # type: ignore[misc]
            found.append(statistics.median(times))
        return found[0], found[1]

    def run(self, steps: int, blocks: tuple[int, int], way: Callable[[Passes], tuple[Predict, Any]]) -> dict[str, Any]:
        """Seconds and scores of each picture. way: makes the prediction for one run, and what counts its skips."""
        passes = self.passes(blocks)
        pictures, seconds, skipped = [], [], []
        for number, start in enumerate(self._starts.values()):
            passes.reset(self._caption[number : number + 1])
            predict, holder = way(passes)
            gone, picture = self._timed(lambda p=predict, s=start: sample(p, s, steps))  # type: ignore[misc]
            pictures.append(picture)
            seconds.append(gone)
            skipped.append(getattr(holder, "total_steps_skipped", 0))
        return {"pictures": torch.cat(pictures), "seconds": seconds, "skipped": skipped}

    def scored(self, run: dict[str, Any], full: torch.Tensor) -> dict[str, Any]:
        """Scores for each seed: means over its captions."""
        error = ((run["pictures"] - full) / 2).square().flatten(1).mean(1)
        psnr = (-10 * error.clamp(min=1e-10).log10()).tolist()
        features = (self._features(run["pictures"]) - self._features(full)).square().mean((1, 2)).tolist()
        each = {"psnr": psnr, "features": features, "seconds": run["seconds"], "skipped": run["skipped"]}
        return {name: self._by_seed(values) for name, values in each.items()}

    def _by_seed(self, values: list[float]) -> list[float]:
        size = self._per_seed
        return [statistics.mean(values[at * size : (at + 1) * size]) for at in range(len(self._seeds))]

    def _features(self, pictures: torch.Tensor) -> torch.Tensor:
        """Hidden states of a few blocks at almost no noise, each of length 1: (count, blocks x tokens, WIDTH)."""
        caption = no_caption(self._caption[:1]).expand(len(pictures), -1)
        h, vector = self._model.begin(pictures, torch.full((len(pictures),), 0.02, device=self._device), caption)
        found = []
        for number, block in enumerate(self._model.blocks):
            h = block(h, vector)
            if number in FEATURE_BLOCKS:
                found.append(torch.nn.functional.normalize(h[:, len(FIELDS) :].float(), dim=-1))
        return torch.cat(found, dim=1)

    def _timed(self, run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        if self._device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = run()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, out


def compare(
    comparison: Comparison, steps: int, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """All rows of one number of steps."""
    from .easycache import easycache

    everything = list(range(steps))
    blocks_of = {blocks: comparison.pass_seconds(blocks) for blocks in options.blocks}
    full_seconds = min(full for full, _ in blocks_of.values())
    any_blocks = options.blocks[0]
    reference = comparison.run(steps, any_blocks, lambda passes: (scheduled(passes, everything), None))["pictures"]

    def row(kind: str, setting: Any, full: int, blocks: tuple[int, int], way: Any, of: int = steps) -> None:
        found = comparison.scored(comparison.run(of, blocks, way), reference)
        fulls = [full - skipped for skipped in found["skipped"]]
        fast = 0 if kind in ("full", "fewer steps", "EasyCache") else steps - full
        cost = [count * full_seconds + fast * blocks_of[blocks][1] for count in fulls]
        keep({"steps": steps, "kind": kind, "setting": setting, "blocks": blocks, "full": fulls, "fast": fast,
              "model_seconds": cost, **found})  # fmt: skip

    row("full", steps, steps, any_blocks, lambda passes: (scheduled(passes, everything), None))
    for fewer in sorted({max(2, round(steps * share)) for share in options.budgets}):
        shorter = list(range(fewer))
        row("fewer steps", fewer, fewer, any_blocks, lambda p, s=shorter: (scheduled(p, s), None), of=fewer)
    for threshold in options.thresholds:
        row("EasyCache", threshold, steps, any_blocks, lambda p, t=threshold: easycache(p, t))
    for blocks in options.blocks:
        seen = schedules.watched(comparison.passes(blocks), comparison.calibration, steps)
        changes = [round(0.03 * 1.5**n, 3) for n in range(10)]
        plans = [("fixed", n, schedules.fixed(steps, n)) for n in (2, 3, 4, 5, 6, 8)]
        plans += [("planned, changes", change, schedules.by_threshold(seen, change)) for change in changes]
        for count in sorted({max(2, round(steps * share)) for share in options.budgets}):
            plans.append(("planned", count, schedules.by_distance(seen, count)))
        if blocks == any_blocks:
            weights = schedules.probed_weights(comparison.passes(blocks), comparison.calibration, steps, seen)
            counts = [count for kind, count, _ in plans if kind == "planned"]
            plans += [("probed", count, schedules.by_distance(seen, count, weights)) for count in counts]
        for kind, setting, plan in plans:
            row(kind, setting, len(plan), blocks, lambda p, s=plan: (scheduled(p, s), None))


def sheet(model: Transformer, file: Path) -> None:
    """Write eight full runs of 50 steps beside each other, to see what was learned."""
    from PIL import Image

    device = model.place.device.type
    caption = captions(8, torch.Generator(device).manual_seed(99))
    with torch.inference_mode():

        def predict(_: int, both: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return model(both, t.expand(len(both)), torch.cat([caption, no_caption(caption)])).float()

        pictures = sample(predict, noise(1, 8, device), 50)
    flat = ((pictures + 1) * 127.5).byte().permute(2, 0, 3, 1).flatten(1, 2).cpu().numpy()
    Image.fromarray(flat).save(file)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the raw numbers to this file")
    parser.add_argument("--weights", type=Path, required=True, help="the trained transformer; written if missing")
    parser.add_argument("--pictures", type=Path, help="write a sheet of full runs to this PNG file")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, nargs="*", default=list(STEPS))
    parser.add_argument("-v", action="store_true", help="print each row")
    parser.add_argument("--quick", action="store_true", help="a few training steps, one seed, few settings")
    options = parser.parse_args()
    options.blocks, options.budgets, options.thresholds = BLOCKS, BUDGETS, THRESHOLDS
    options.seeds, options.per_seed = SEEDS, CAPTIONS
    if options.quick:
        options.blocks, options.budgets, options.thresholds = BLOCKS[:1], (0.3, 0.5), (0.2, 0.5)
        options.seeds, options.per_seed, options.batch = SEEDS[:2], 1, 8
    return options


def main() -> int:
    options = parse()
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from comfy.cli_args import args

        args.cpu = True  # before anything of ComfyUI asks for its device
    where = {"gpu": torch.cuda.get_device_name() if device == "cuda" else None, "torch": torch.__version__}
    torch.manual_seed(0)
    model = Transformer(**({"width": 64, "depth": 12} if options.quick else {})).to(device)
    if options.weights.exists():
        state = torch.load(options.weights, weights_only=True)
        model.load_state_dict(state["model"])
        model.eval().requires_grad_(False)
        training = state["training"]
    else:
        model, training = train(model, options.minutes * 60, options.batch, print, 20 if options.quick else 10**9)
        torch.save({"model": model.state_dict(), "training": training}, options.weights)
    rows: list[dict[str, Any]] = []
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(), **where, "training": training,
              "width": WIDTH, "depth": DEPTH, "tokens": TOKENS, "seeds": options.seeds, "captions": options.per_seed,
              "rows": rows, "plain": []}  # fmt: skip

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if options.v:
            print(verdict.line(row), flush=True)

    if options.pictures:
        sheet(model, options.pictures)
    with torch.inference_mode():
        precision = torch.bfloat16 if device == "cuda" else torch.float32
        comparison = Comparison(model.to(precision), device, options.seeds, options.per_seed)
        for steps in options.steps:
            compare(comparison, steps, options, keep)
            result["plain"] = verdict.verdict(rows)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print("\n".join(verdict.table(result["plain"], steps)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
