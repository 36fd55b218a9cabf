"""Transformers of real width with random weights: stock ComfyUI, its TorchCompileModel, and Resolute, in one server.

    python -m benchmarks.families --out benchmarks/results/NAME-families.json [--family flux z-image qwen-image wan ...]
                                  [--seconds 450] [--argument --disable-dynamic-vram ...] [--cpu]
                                  [--environment TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 ...]

The models have fewer layers than the real ones, and their weights are made on the GPU. `ms` is the time of a step:
(prompt of STEPS steps - prompt of one) / (STEPS - 1). `floor_ms`: the matrix products and the attention of one step at
FLOOR_TFLOPS. `error`: Resolute's latents against stock's. `cold_s` and `new_size_s`: by how much the first prompt of a
size is longer than the next one with Resolute; at a new size, beyond stock's own first prompt.

Core's node is measured last, and compiles for minutes: what `--seconds` leaves no time for is null in the rows, and a
later run with the same `--out` measures it. `--models` keeps the models, `--folder` the server's folder. Needs CUDA and
the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu` runs models of one
layer, which checks the script and measures nothing. `--environment` sets a variable of the server, for all contenders;
with the one above, compiled kernels round where ComfyUI's own do, with RESOLUTE_ATTENTION=measured they choose their
attention for each shape. `attention` in the file then names the choices.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.errors import ServerError
from scripts.server.client import Client, execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .cells import Cells, OutOfTimeError, add_options, parts
from .family_models import FAMILIES, Family, family, floor_ms, make_all
from .rig import ROOT, STOCK, environment, node, without_paths
from .weight_formats import file_of

CORE, OURS = "TorchCompileModel", "resolute"
STEPS = 10
FLOOR_TFLOPS = 790  # what an H200 reaches in large products of bf16
MAX_FLOORS, MAX_COLD, MAX_NEW_SIZE = 1.6, 12.0, 0.2  # the aims
_TOLD = ("attention", "comfy_kitchen", "Set vram state", "Device:")  # lines of ComfyUI's log about the machine


class Bench:
    """A server, the models that it has, and the time that is left."""

    def __init__(self, client: Client, options: argparse.Namespace, deadline: float) -> None:
        self.client, self.deadline, self.weights, self.is_small = client, deadline, options.weights, options.cpu
        self.steps = 3 if options.cpu else STEPS

    def seconds(self, prompt: dict[str, Any]) -> tuple[float, Any]:
        """Run a prompt: its seconds and its history. Raises OutOfTimeError."""
        left = self.deadline - time.monotonic()
        if left < 1:
            raise OutOfTimeError
        try:
            history = self.client.run(prompt, left)
        except ServerError as error:
            if time.monotonic() >= self.deadline - 1:
                raise OutOfTimeError from error
            raise
        return execution_seconds(history), history

    def prompt(self, name: str, contender: str, size: tuple[int, int], steps: int, seed: int) -> dict[str, Any]:
        return prompt(name, family(name, self.is_small), contender, size, self.weights, steps, seed)

    def measure(self, name: str, contender: str, size: tuple[int, int]) -> dict[str, Any]:
        """Three prompts and two of one step. A prompt that fails is a result."""
        before = rig.counters(self.client)
        try:
            # Load the weights, which the next model's prompts unloaded, and the kernels of this size.
            self.seconds(self.prompt(name, STOCK, size, 1, 0))
            runs = [self.seconds(self.prompt(name, contender, size, self.steps, 1 + n)) for n in range(3)]
            short = [self.seconds(self.prompt(name, contender, size, 1, 9 + n))[0] for n in range(2)]
        except OutOfTimeError:
            raise
        except Exception as error:  # noqa: BLE001 (core's node fails with some models; the others are still measured)
            return {"failed": f"{type(error).__name__}: {first_line(error)}"}
        risen = rig.rise(before, rig.counters(self.client))
        steady = min(seconds for seconds, _ in runs[1:])
        return {
            "seconds": [seconds for seconds, _ in runs],
            "one_step_seconds": short,
            "first_s": runs[0][0] - steady,
            "ms": 1000 * (steady - min(short)) / (self.steps - 1),
            "bypasses": risen.pop("bypasses"),
            "counters": risen,
            "latents": rig.latents(self.client, runs[0][1]),
        }


def prompt(
    name: str, family: Family, contender: str, size: tuple[int, int], weights: str, steps: int, seed: int
) -> dict[str, Any]:
    """Sample with core's nodes and save the latents; the compile node is the only difference between contenders."""
    video = {"length": family.frames} if family.frames > 1 else {}
    batch = {} if family.sound else {"batch_size": 1}  # core's node of a video with sound makes one
    model = ["load", 0]
    text = {"tokens": family.tokens, "width": family.width, "pooled_width": family.pooled, "batch": 1}
    text |= {"padding": family.padding} if family.padding else {}
    nodes: dict[str, Any] = {
        "load": node("UNETLoader", unet_name=file_of(name), weight_dtype=weights),
        "positive": node("ResoluteTestConditioning", seed=1, **text),
        "negative": node("ResoluteTestConditioning", seed=2, **text),
        "latent": node(family.latent, width=size[0], height=size[1], **batch, **video),
    }
    if contender != STOCK:
        kind = CORE if contender == CORE else "ResoluteCompileModel"
        nodes["compile"] = node(kind, model=model, backend="inductor")
        model = ["compile", 0]
    return rig.sampled(nodes, model, seed, steps, 1.0, "simple")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def fill(row: dict[str, Any], results: dict[str, dict[str, Any]], is_first_size: bool) -> None:
    """Put what was measured so far into a row."""
    ours, stock, core = (results.get(contender, {}) for contender in (OURS, STOCK, CORE))
    row.update(stock_ms=stock.get("ms"), core_ms=core.get("ms"), resolute_ms=ours.get("ms"))
    row["error"], row["core_error"] = _error(ours, stock), _error(core, stock)
    if "first_s" in ours and "first_s" in stock:
        extra = ours["first_s"] - max(stock["first_s"], 0.0)
        row.update({"cold_s": ours["first_s"]} if is_first_size else {"new_size_s": extra})
    row["details"] = {
        contender: {key: value for key, value in result.items() if key != "latents"}
        for contender, result in results.items()
    }


def _error(ours: dict[str, Any], stock: dict[str, Any]) -> float | None:
    return rig.error(ours["latents"], stock["latents"]) if "latents" in ours and "latents" in stock else None


# --- the table ------------------------------------------------------------------------------------------------------

_HEAD = (
    f"{'family':<11}{'size':<13}{'stock':>8}{'core':>8}{'ours':>8}{'floor':>8}{'/floor':>7}{'cold':>6}{'new':>7}"
    f"{'error':>9}{'(core)':>9}  replays/steps, aims missed and bypasses\n{'':<24}{'ms':>8}{'ms':>8}{'ms':>8}{'ms':>8}"
    f"{'':>7}{'s':>6}{'s':>7}"
)


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, with the aims that each misses: a step of 1.6 floors, faster than core, cold in 12 s, a new size 0.2 s
    more than stock's.
    """
    return "\n".join([_HEAD, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    times = "".join(_cell(row[f"{key}_ms"], 8, ".1f") for key in ("stock", "core", "resolute", "floor"))
    floors = row["resolute_ms"] / row["floor_ms"] if row["resolute_ms"] and row["floor_ms"] else None
    ours = row["details"].get(OURS, {})
    counted = ours.get("counters", {})
    missed = [
        text
        for text, value, most in (
            ("floor", floors, MAX_FLOORS),
            ("cold", row.get("cold_s"), MAX_COLD),
            ("new size", row.get("new_size_s"), MAX_NEW_SIZE),
            ("slower than core", row["resolute_ms"], row["core_ms"]),
            ("slower than stock", row["resolute_ms"], row["stock_ms"]),
        )
        if value is not None and most is not None and value > most
    ]
    notes = [f"{counted.get('replays', 0)}/{3 * STEPS + 2}", "missed: " + ", ".join(missed) if missed else "all met"]
    notes += [f"{count}x {code}" for code, count in ours.get("bypasses", {}).items() if count]
    notes += [f"{who} failed: {result['failed']}" for who, result in row["details"].items() if "failed" in result]
    return (
        f"{row['family']:<11}{row['size']:<13}{times}{_cell(floors, 7, '.2f')}{_cell(row.get('cold_s'), 6, '.1f')}"
        f"{_cell(row.get('new_size_s'), 7, '.2f')}{_cell(row['error'], 9, '.1e')}{_cell(row['core_error'], 9, '.1e')}"
        f"  {'; '.join(notes)}"
    )


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


# --- the command ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--weights", default="default", help="as UNETLoader names them")
    parser.add_argument("--sizes", type=int, default=99, help="visit only the first sizes")
    parser.add_argument("--no-core", action="store_true", help="leave core's node out")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="for ComfyUI")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    add_options(parser, seconds=450, cpu="small models")
    parser.add_argument("--make", nargs=2, type=Path, metavar=("FOLDER", "COMFYUI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_all(options.make[1], options.make[0], options.family, options.cpu)
        return 0
    cells = Cells(options, lambda row: (row["family"], row["size"], row["weights"]))
    setup = command.prepare()
    with tempfile.TemporaryDirectory(prefix="resolute-families-") as work:
        base = options.models or Path(work)
        folder = base / "diffusion_models"
        folder.mkdir(parents=True, exist_ok=True)
        child = [str(setup.python), "-m", "benchmarks.families", "--make", str(folder), str(setup.comfyui)]
        child += ["--family", *options.family, *(["--cpu"] if options.cpu else [])]
        subprocess.run(child, cwd=ROOT, check=True)
        return _run(setup, base, options.folder or Path(work) / "server", options, cells)


def _run(setup: command.Setup, base: Path, where: Path, options: argparse.Namespace, cells: Cells) -> int:
    given = dict(each.split("=", 1) for each in options.environment)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(where / "inductor"), **given}  # kernels of an earlier run are not cold
    server = rig.server(setup, where, options.argument, models=base, cpu=options.cpu, environment=variables)
    with server:
        cells.about |= {**environment(server), "arguments": without_paths(options.argument)}
        cells.about |= {
            "environment": options.environment,
            "floor_tflops": FLOOR_TFLOPS,
            "steps": STEPS,
            "is_cpu": options.cpu,
        }
        print("\n".join(line for line in server.log().splitlines() if any(part in line for part in _TOLD)), flush=True)
        try:
            _measure_all(Bench(server.client, options, cells.deadline), server, base, options, cells)
        finally:
            print(f"\n{_reasons(server)}\n\n{table(cells.rows)}", flush=True)
            if options.out:
                options.out.with_suffix(".log").write_text(server.log(), "utf-8")
    return 0


def _measure_all(bench: Bench, server: ComfyServer, base: Path, options: argparse.Namespace, cells: Cells) -> None:
    """All families with stock and ours, then all with core's node; of each what the file lacks."""
    latents: dict[str, dict[str, Any]] = {}  # of stock, by the name of a cell

    def begin(name: str, size: tuple[int, int]) -> dict[str, Any]:
        frames = family(name, options.cpu).frames
        floor = floor_ms(base / "diffusion_models" / file_of(name), size, FLOOR_TFLOPS)
        text = "x".join(map(str, size)) + (f"x{frames}" if frames > 1 else "")
        return {"family": name, "size": text, "weights": options.weights, "floor_ms": floor, "details": {}}

    def measure(row: dict[str, Any], size: tuple[int, int], contenders: Sequence[str], is_first: bool) -> Any:
        """The row with these contenders too, after each of them."""
        cell, results = f"{row['family']} {row['size']}", dict(row["details"])

        def add(contender: str) -> None:
            results[contender] = bench.measure(row["family"], contender, size)
            if contender == STOCK:
                latents[cell] = {key: each for key, each in results[STOCK].items() if key == "latents"}
            elif contender == CORE and cell not in latents:  # an earlier run measured stock
                reference = bench.seconds(bench.prompt(row["family"], STOCK, size, STEPS, 1))[1]
                latents[cell] = {"latents": rig.latents(server.client, reference)}
            if STOCK in results:
                results[STOCK] |= latents.get(cell, {})
            errors = {name: row.get(name) for name in ("error", "core_error")}
            fill(row, results, is_first)
            row.update({name: value for name, value in errors.items() if row[name] is None})

        return parts(row, contenders, add)

    places = [
        (name, size, place == 0)
        for name in options.family
        for place, size in enumerate(family(name, options.cpu).sizes[: options.sizes])
    ]
    for contenders in [(OURS, STOCK), *([] if options.no_core else [(CORE,)])]:
        for name, size, is_first in places:
            row = begin(name, size)
            row = cells.find((row["family"], row["size"], row["weights"])) or row
            missing = [each for each in contenders if "failed" in row["details"].get(each, {"failed": "not tried"})]
            if not missing or (STOCK not in contenders and STOCK not in row["details"]):
                continue
            cell = f"{name} {row['size']} {' '.join(contenders)}"
            given = (row, size, contenders, is_first)
            if cells.measure(cell, functools.partial(measure, *given)) is not None:
                print(_line(row), flush=True)
                about = {"attention": server.client.get("/resolute/cache")["attention"]}
                cells.save(**about, **server.client.get("/resolute/events"))


def _reasons(server: ComfyServer) -> str:
    """Resolute's reports: captures that failed, and blocks that run as they are."""
    events = server.client.get("/resolute/events")["events"]
    told = dict.fromkeys(event["text"] for event in events if event["kind"] == "bypass")
    return "\n".join(f"reason: {text}" for text in told)


if __name__ == "__main__":
    sys.exit(main())
