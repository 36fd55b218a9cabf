"""Transformers of real width with quantized random weights: stock ComfyUI, its TorchCompileModel, and Resolute.

    python -m benchmarks.quantized --out benchmarks/results/NAME-quantized.json [--row flux:fp8-scaled flux:int8 ...]
                                   [--seconds 280] [--sizes 1] [--core] [--models FOLDER] [--argument ...] [--cpu]

A row is a family and a format of `benchmarks.family_models`, at one size; rows are measured in the order given.
`ms` is the time of a step, as in `benchmarks.families`. `error_stock` and `error_resolute`: the latents of one step
against the same weights computed in fp32. `floor_ms`: attention at FLOOR_TFLOPS, products at the speed of the format.
`formats`: what computed the weights, as the report says it.

What `--seconds` leaves no time for is null in the rows. Needs CUDA and the environment of `scripts/test` (without a
network, set RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu` runs models of one layer, which checks the script.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .families import CORE, FLOOR_TFLOPS, OURS, Bench, OutOfTimeError, first_line
from .families import prompt as family_prompt
from .family_models import FAMILIES, FORMATS, family, file_of, floor_ms, make_all
from .rig import ROOT, STOCK, environment, node, without_paths

REFERENCE = "reference"
ROWS = ("flux:fp8-scaled", "flux:int8", "flux:fp8-fast", "z-image:int8", "z-image:fp8-scaled", "qwen-image:fp8-scaled")
LEAST_GAIN = 1.5  # the aim in fp8: so many times stock's speed


class QuantizedBench(Bench):
    """The bench of `families`, for files in one format."""

    form = ""

    def prompt(self, name: str, contender: str, size: tuple[int, int], steps: int, seed: int) -> dict[str, Any]:
        """A prompt of `families` with the file of the format; the reference computes in fp32."""
        given = STOCK if contender == REFERENCE else contender
        nodes = family_prompt(name, family(name, self.is_small), given, size, FORMATS[self.form].loader, steps, seed)
        nodes["load"]["inputs"]["unet_name"] = file_of(name, self.form)
        if contender == REFERENCE:
            nodes["reference"] = node("ResoluteTestReferenceModel", model=["load", 0])
            nodes["sample"]["inputs"]["model"] = ["reference", 0]
        return nodes

    def one_step(self, name: str, contender: str, size: tuple[int, int]) -> Any:
        """The latents of one step; None if the prompt fails."""
        try:
            return rig.latents(self.client, self.seconds(self.prompt(name, contender, size, 1, 50))[1])
        except OutOfTimeError:
            raise
        except Exception as error:  # noqa: BLE001 (the times of the row still count)
            print(f"{name} {self.form} {contender}: {first_line(error)}", flush=True)
            return None


def measure(
    bench: QuantizedBench, name: str, size: tuple[int, int], with_core: bool, row: dict[str, Any], note: Any
) -> None:
    """Fill a row, and note it after each contender."""
    found: dict[str, dict[str, Any]] = {}
    row["details"] = found
    latents: dict[str, Any] = {}
    for contender in (STOCK, OURS, *([CORE] if with_core else [])):
        result = bench.measure(name, contender, size)
        result.pop("latents", None)
        found[contender] = result
        row[f"{contender if contender in (STOCK, OURS) else 'core'}_ms"] = result.get("ms")
        if contender == OURS:
            row["formats"] = sorted(
                {text for module in bench.client.get("/resolute/cache")["modules"] for text in module["formats"]}
            )
        if contender != CORE:
            latents[contender] = bench.one_step(name, contender, size)
        note(row)
    reference = bench.one_step(name, REFERENCE, size)
    for contender, values in latents.items():
        if reference is not None and values is not None:
            row[f"error_{contender}"] = rig.error(values, reference)
    note(row)


_HEAD = (
    f"{'family':<11}{'format':<13}{'size':<11}{'stock':>8}{'core':>8}{'ours':>8}{'floor':>8}{'gain':>6}{'stock':>10}"
    f"{'ours':>10}  replays, captures, compiles; formats\n{'':<35}{'ms':>8}{'ms':>8}{'ms':>8}{'ms':>8}{'':>6}"
    f"{'error':>10}{'error':>10}"
)


def _line(row: dict[str, Any]) -> str:
    times = "".join(_cell(row[f"{key}_ms"], 8, ".1f") for key in (STOCK, "core", OURS, "floor"))
    gain = row["stock_ms"] / row["resolute_ms"] if row["stock_ms"] and row["resolute_ms"] else None
    errors = "".join(_cell(row[f"error_{key}"], 10, ".2e") for key in (STOCK, OURS))
    ours = row.get("details", {}).get(OURS, {})
    counted = ours.get("counters", {})
    notes = [", ".join(str(counted.get(each, "-")) for each in ("replays", "captures", "region_compiles"))]
    notes += row.get("formats", [])
    notes += [f"{count}x {code}" for code, count in ours.get("bypasses", {}).items()]
    notes += [f"{who}: {result['failed']}" for who, result in row.get("details", {}).items() if "failed" in result]
    least = LEAST_GAIN if row["format"].startswith("fp8") else 1.0
    if gain is not None and gain < least:
        notes.append(f"missed: {least} times stock")
    line = f"{row['family']:<11}{row['format']:<13}{row['size']:<11}{times}{_cell(gain, 6, '.2f')}{errors}"
    return f"{line}  {'; '.join(notes)}"


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{name}:{form}" for name in FAMILIES for form in FORMATS]
    parser.add_argument("--row", nargs="*", choices=every, default=list(ROWS), metavar="FAMILY:FORMAT")
    parser.add_argument("--sizes", type=int, default=1, help="visit so many sizes of each")
    parser.add_argument("--seconds", type=float, default=280, help="end after this time, with what there is")
    parser.add_argument("--core", action="store_true", help="measure core's node too, which compiles for long")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="for ComfyUI")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU, to check this script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", nargs=2, type=Path, metavar=("FOLDER", "COMFYUI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted: dict[str, list[str]] = {}
    for name, _, form in (row.partition(":") for row in options.row):
        wanted.setdefault(name, []).append(form)
    if options.make:
        for name, forms in wanted.items():
            make_all(options.make[1], options.make[0], [name], options.cpu, forms)
        return 0
    options.weights = ""  # of `families`; here it depends on the row
    deadline = time.monotonic() + options.seconds
    setup = command.prepare()
    with tempfile.TemporaryDirectory(prefix="resolute-quantized-") as work:
        base = options.models or Path(work)
        folder = base / "diffusion_models"
        folder.mkdir(parents=True, exist_ok=True)
        child = [str(setup.python), "-m", "benchmarks.quantized", "--make", str(folder), str(setup.comfyui)]
        child += ["--row", *options.row, *(["--cpu"] if options.cpu else [])]
        subprocess.run(child, cwd=ROOT, check=True)
        variables = dict(each.split("=", 1) for each in options.environment)
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(Path(work) / "inductor"), **variables}
        server = rig.server(
            setup, Path(work) / "server", options.argument, models=base, cpu=options.cpu, environment=variables
        )
        with server:
            _measure_all(server, base, options, deadline)
    return 0


def _measure_all(server: ComfyServer, base: Path, options: argparse.Namespace, deadline: float) -> None:
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {**environment(server), "arguments": without_paths(options.argument)}
    about |= {"environment": options.environment, "floor_tflops": FLOOR_TFLOPS, "is_cpu": options.cpu}

    def note(row: dict[str, Any]) -> None:
        print(_line(row), flush=True)
        rig.save(options.out, {**about, "rows": rows})

    bench = QuantizedBench(server.client, options, deadline)
    try:
        for name, _, form in (row.partition(":") for row in options.row):
            for size in family(name, options.cpu).sizes[: options.sizes]:
                file = base / "diffusion_models" / file_of(name, form)
                row: dict[str, Any] = {
                    "family": name, "format": form, "size": "x".join(map(str, size)), "stock_ms": None,
                    "core_ms": None, "resolute_ms": None,
                    "floor_ms": floor_ms(file, size, FLOOR_TFLOPS, FORMATS[form].tera),
                    "error_stock": None, "error_resolute": None,
                }  # fmt: skip
                rows.append(row)
                bench.form = form
                measure(bench, name, size, options.core, row, note)
    except OutOfTimeError:
        print(f"{options.seconds:.0f} s are over: what is '-' was not measured", flush=True)
    finally:
        events = server.client.get("/resolute/events")["events"]
        told = dict.fromkeys(event["text"] for event in events if event["kind"] == "bypass")
        print("\n".join(["", *(f"reason: {text}" for text in told), _HEAD, *map(_line, rows)]), flush=True)
        if options.out:
            options.out.with_suffix(".log").write_text(server.log(), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
