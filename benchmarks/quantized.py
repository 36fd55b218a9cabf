"""Transformers of real width with quantized random weights: stock ComfyUI, Resolute, and core's TorchCompileModel.

    python -m benchmarks.quantized --out benchmarks/results/NAME-quantized.json [--row flux:fp8-scaled flux:int8 ...]
                                   [--seconds 260] [--sizes 1] [--core flux:fp8-scaled] [--lora flux:fp8-scaled]
                                   [--models FOLDER] [--argument ...] [--cpu] [--gguf-pack FOLDER] [--packages FOLDER]

A row is a family of `benchmarks.family_models` and a format of `benchmarks.weight_formats`, at one size; rows are
measured in the order given. `ms` is the time of a step, as in `benchmarks.families`. `error_stock` and
`error_resolute`: the latents of one step against the same weights computed in fp32. `floor_ms`: attention at
FLOOR_TFLOPS, products at the speed of the format. `formats`: what computed the weights, as the report says it. `lora`:
what was counted over four prompts of four steps: with a LoRA of the blocks, with another strength, once more, and
without.

Each cell (resolute, stock, errors, lora, core) is written when it is measured. A run with the same `--out`
goes on with the cells that it lacks: give it the same `--models`, which keeps the files, several GB each. Needs CUDA
and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu` runs models of
one layer, which checks the script. Rows in GGUF (q8-0, q4-k) need a clone of https://github.com/city96/ComfyUI-GGUF and
the package gguf, and are measured beside that pack.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.errors import as_command
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import gguf_file, rig
from .families import CORE, FLOOR_TFLOPS, OURS, Bench, OutOfTimeError, first_line
from .families import prompt as family_prompt
from .family_models import FAMILIES, family, floor_ms, make_all
from .quantized_table import Row, line, rows_of, size_of, table
from .rig import ROOT, STOCK, environment, node, without_paths
from .weight_formats import FORMATS, file_of

REFERENCE = "reference"
FILES, LORAS = "diffusion_models", "loras"  # folders of ComfyUI
ROWS = tuple(
    f"{name}:{form}" for name in ("flux", "z-image", "qwen-image", "wan") for form in ("fp8-scaled", "fp8-fast", "int8")
)
LORA_STRENGTHS = (1.0, 0.5, 0.5, None)  # of one prompt each; None: without it


class QuantizedBench(Bench):
    """The bench of `families`, for files in one format."""

    form = ""

    def prompt(self, name: str, contender: str, size: tuple[int, int], steps: int, seed: int) -> dict[str, Any]:
        """A prompt of `families` with the file of the format; the reference computes in fp32."""
        given = STOCK if contender == REFERENCE else contender
        nodes = family_prompt(name, family(name, self.is_small), given, size, FORMATS[self.form].loader, steps, seed)
        nodes["load"]["inputs"]["unet_name"] = file_of(name, self.form)
        if FORMATS[self.form].gguf:
            nodes["load"] = node(gguf_file.LOADER, unet_name=file_of(name, self.form))
        if contender == REFERENCE:
            nodes["reference"] = node("ResoluteTestReferenceModel", model=["load", 0])
            nodes["sample"]["inputs"]["model"] = ["reference", 0]
        return nodes

    def one_step(self, name: str, contender: str, size: tuple[int, int]) -> Any:
        return rig.latents(self.client, self.seconds(self.prompt(name, contender, size, 1, 50))[1])

    def with_lora(self, name: str, size: tuple[int, int]) -> dict[str, Any]:
        """The counters over LORA_STRENGTHS, and the seconds of each prompt."""
        self.seconds(self.prompt(name, OURS, size, 2, 59))  # the rows between dropped the model
        before = rig.counters(self.client)
        seconds = self._seconds_with_lora(name, OURS, size)
        risen = rig.rise(before, rig.counters(self.client))
        return {"stock_seconds": self._seconds_with_lora(name, STOCK, size), "seconds": seconds, **risen}

    def _seconds_with_lora(self, name: str, contender: str, size: tuple[int, int]) -> list[float]:
        seconds = []
        for number, strength in enumerate(LORA_STRENGTHS):
            nodes = self.prompt(name, contender, size, 4, 60 + number)
            if strength is not None:
                given = {"lora_name": file_of(name), "strength_model": strength}
                nodes["lora"] = node("LoraLoaderModelOnly", model=["load", 0], **given)
                nodes["sample" if contender == STOCK else "compile"]["inputs"]["model"] = ["lora", 0]
            seconds.append(self.seconds(nodes)[0])
        return seconds


# --- cells ----------------------------------------------------------------------------------------------------------


class Runner:
    """Measures what rows lack, and notes each cell."""

    def __init__(self, server: ComfyServer, bench: QuantizedBench, note: Callable[[Row], None]) -> None:
        self._server, self._bench, self._note = server, bench, note

    def measure(self, row: Row) -> None:
        """Resolute, stock, and the errors of both."""
        self._bench.form = row["format"]
        name, size = row["family"], size_of(row)
        for contender in (OURS, STOCK):
            if _lacks(row, contender):
                self._times(row, contender)
                if contender == OURS:
                    row["formats"] = self._formats()
                self._note(row)
        if _lacks(row, "errors"):
            row["details"]["errors"] = self._attempt(self._errors, row, name, size)
            self._note(row)

    def measure_core(self, row: Row) -> None:
        self._bench.form = row["format"]
        if _lacks(row, CORE):
            self._times(row, CORE)
            self._note(row)

    def measure_lora(self, row: Row) -> None:
        self._bench.form = row["format"]
        if _lacks(row, "lora"):
            row["details"]["lora"] = self._attempt(self._bench.with_lora, row["family"], size_of(row))
            self._note(row)

    def _times(self, row: Row, contender: str) -> None:
        result = self._bench.measure(row["family"], contender, size_of(row))
        result.pop("latents", None)
        row["details"][contender] = result
        row[f"{'core' if contender == CORE else contender}_ms"] = result.get("ms")

    def _formats(self) -> list[str]:
        modules = self._server.client.get("/resolute/cache")["modules"]
        return sorted({text for module in modules for text in module["formats"]})

    def _errors(self, row: Row, name: str, size: tuple[int, int]) -> dict[str, Any]:
        found = {each: self._bench.one_step(name, each, size) for each in (STOCK, OURS, REFERENCE)}
        for contender in (STOCK, OURS):
            row[f"error_{contender}"] = rig.error(found[contender], found[REFERENCE])
        return {"between": rig.error(found[OURS], found[STOCK])}

    def _attempt(self, measure: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        """A measurement; what fails is a result too. Raises OutOfTimeError."""
        try:
            return measure(*given)
        except OutOfTimeError:
            raise
        except Exception as error:  # noqa: BLE001 (the other cells still count)
            return {"failed": f"{type(error).__name__}: {first_line(error)}"}


def _lacks(row: Row, cell: str) -> bool:
    return "failed" in row["details"].get(cell, {"failed": "it was not tried"})


# --- the command ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [
        f"{name}:{form}"
        for name in FAMILIES
        for form in FORMATS
        if not FORMATS[form].gguf or name in gguf_file.ARCHITECTURES
    ]
    choice: dict[str, Any] = {"nargs": "*", "choices": every, "metavar": "FAMILY:FORMAT"}
    parser.add_argument("--row", **choice, default=list(ROWS))
    parser.add_argument("--core", **choice, default=[], help="rows that core's node runs too; it compiles for long")
    parser.add_argument("--lora", **choice, default=[], help="rows that run with a LoRA, another strength, and without")
    parser.add_argument("--sizes", type=int, default=1, help="visit so many sizes of each")
    parser.add_argument("--seconds", type=float, default=260, help="end after this time, with what there is")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="for ComfyUI")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    parser.add_argument("--gguf-pack", type=Path, metavar="FOLDER", help="the nodes of ComfyUI-GGUF, for rows in GGUF")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="Python packages that the environment lacks")
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU, to check this script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", nargs=2, type=Path, metavar=("FOLDER", "COMFYUI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        for name in {row.partition(":")[0] for row in options.row}:
            forms = [row.partition(":")[2] for row in options.row if row.partition(":")[0] == name]
            make_all(options.make[1], options.make[0] / FILES, [name], options.cpu, forms, options.make[0] / LORAS)
        return 0
    options.weights = ""  # of `families`; here it depends on the row
    deadline = time.monotonic() + options.seconds
    setup = command.prepare()
    if any(FORMATS[row.partition(":")[2]].gguf for row in options.row):
        gguf_file.require(setup.python, options.gguf_pack, options.packages)
    with tempfile.TemporaryDirectory(prefix="resolute-quantized-") as work:
        base = options.models or Path(work)
        variables = dict(each.split("=", 1) for each in options.environment)
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(work) / "inductor"),
            **gguf_file.python_path(options.packages),
            **variables,
        }
        packs = {"ComfyUI-GGUF": options.gguf_pack} if options.gguf_pack else {}
        for folder in (FILES, LORAS):
            (base / folder).mkdir(parents=True, exist_ok=True)
        server = rig.server(
            setup, Path(work) / "server", options.argument, models=base, cpu=options.cpu, environment=variables,
            packs=packs,
        )  # fmt: skip
        with server:
            _measure_all(server, setup, base, options, deadline)
    return 0


def _measure_all(
    server: ComfyServer, setup: command.Setup, base: Path, options: argparse.Namespace, deadline: float
) -> None:
    rows = rows_of(options.row, options.sizes, options.cpu, options.out)
    about: dict[str, Any] = {**environment(server), "arguments": without_paths(options.argument)}
    about |= {"environment": options.environment, "floor_tflops": FLOOR_TFLOPS, "is_cpu": options.cpu}

    def note(row: Row) -> None:
        print(line(row), flush=True)
        rig.save(options.out, {**about, "rows": rows})

    def make(row: Row) -> None:
        """The files of the row's family, unless they are there. Raises OutOfTimeError."""
        file = base / FILES / file_of(row["family"], row["format"])
        if not file.with_suffix(".json").is_file():
            child = [str(setup.python), "-m", "benchmarks.quantized", "--make", str(base), str(setup.comfyui)]
            forms = dict.fromkeys(each["format"] for each in rows if each["family"] == row["family"])
            child += ["--row", *[f"{row['family']}:{form}" for form in forms], *(["--cpu"] if options.cpu else [])]
            try:
                paths = {**os.environ, **gguf_file.python_path(options.packages)}
                subprocess.run(child, cwd=ROOT, env=paths, check=True, timeout=max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired as error:
                raise OutOfTimeError from error
        row["floor_ms"] = floor_ms(file, size_of(row), FLOOR_TFLOPS, FORMATS[row["format"]].tera)

    runner = Runner(server, QuantizedBench(server.client, options, deadline), note)
    steps = ((options.row, runner.measure), (options.lora, runner.measure_lora), (options.core, runner.measure_core))
    try:
        for wanted, measure in steps:
            for row in rows:
                if f"{row['family']}:{row['format']}" in wanted:
                    make(row)
                    measure(row)
    except OutOfTimeError:
        print(f"{options.seconds:.0f} s are over: what is '-' was not measured", flush=True)
    finally:
        rig.save(options.out, {**about, "rows": rows})
        events = server.client.get("/resolute/events")["events"]
        told = dict.fromkeys(event["text"] for event in events if event["kind"] == "bypass")
        print("\n".join(["", *(f"reason: {text}" for text in told), table(rows)]), flush=True)
        if options.out:
            options.out.with_suffix(".log").write_text(server.log(), "utf-8")


if __name__ == "__main__":
    sys.exit(as_command(main))
