"""Models that are larger than the card: seconds and bytes of a step, stock ComfyUI and Resolute.

    python -m benchmarks.streamed --out benchmarks/results/NAME-streamed.json [--cells flux:8 flux:12 qwen-image:8 ...]
                                  [--seconds 500] [--contenders resolute stock] [--folder FOLDER] [--no-resident]
                                  [--cpu]

A cell is a model (MODELS) and the GiB that are free before a server starts; other memory is held. Each contender gets
a server for each cell: first with all memory (`resident_s_per_step`), then with less and less. What Resolute has to
compile, it compiles in servers before; a line says how many regions that were and how long the prompt waited for them
(`compiled` in the file, with the lines of the log). A step is the time from one call of the model to the next, the
median of the settled calls of a prompt. `bytes_per_step_stock`: of the
weights that have no pages on the device. `bytes_per_step_resolute`: what its counter `streamed_bytes` says.
`bus_gb_per_s`: of a pinned gigabyte; "reached" in a line: bytes of a step by its seconds. `error`: Resolute's latents
against those of the same prompt without it, in the same server. In `details`: `first_step_s` of the first prompt;
`prologues` that ran in the timed prompt, and `regions_compiled`, which should be 0.

It writes after each cell, and leaves out what `--out` has already: begin it again for what is missing. `--folder` keeps
models and compiled regions; a model is made on the GPU when it is needed, and deleted when the disk has no room for the
next. Needs CUDA and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH).
`--cpu` goes the whole way with small models and measures nothing: Resolute's weights stream all the same, from a
reservation that has no page (tests/pack/streaming.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from compile_cache.config import default_budget
from scripts.errors import PromptError, ServerError
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import families, rig
from .card_memory import GIB, Memory, bus_gb_per_s, small_card
from .family_models import family, make_all
from .rig import ROOT, STOCK, environment, without_paths
from .streamed_table import ALL, CELLS, HEAD, MODELS, OURS, Model, compiled_line, line, rows_of
from .weight_formats import file_of

STEPS, UNSETTLED = 10, 3
_LEAST_DISK = 30e9  # bytes, for one more model


class OutOfTimeError(Exception):
    pass


class Bench:
    """One contender's server for one model."""

    def __init__(self, server: ComfyServer, model: Model, contender: str, options: argparse.Namespace) -> None:
        assert server.process is not None
        self._server, self._model, self._contender, self._options = server, model, contender, options
        self._family = family(model.name, options.cpu)
        self.memory = None if options.cpu else Memory(psutil.Process(server.process.pid))

    def compile(self) -> dict[str, Any]:
        """Compile what the cell needs. Processes that compile hold memory of the device, so steps are not measured."""
        before, started = rig.counters(self._server.client), time.monotonic()
        notes, _ = self._prompt(2, 0)
        seconds, risen = time.monotonic() - started, rig.rise(before, rig.counters(self._server.client))
        return {
            "regions": risen["region_compiles"],
            "waited_s": round(risen["stall_seconds"], 2),
            "prompt_s": round(seconds, 2),
            "first_call_s": round(notes["calls"][0]["host_ms"] / 1000, 2),
            "resolute_log": self._log(),
        }

    def _log(self) -> list[str]:
        return [text for text in self._server.log().splitlines() if "Resolute:" in text][-12:]

    def measure(self) -> dict[str, Any]:
        """One cell: a first prompt and a timed one; for Resolute one more without it, for the error."""
        before = rig.counters(self._server.client)
        first, _ = self._prompt(4, 1)
        timed_before = rig.counters(self._server.client)
        timed, timed_history = self._prompt(STEPS, 2)
        after = rig.counters(self._server.client)
        settled = timed["calls"][UNSETTLED:]
        streamed = (after.get("streamed_bytes", 0) - timed_before.get("streamed_bytes", 0)) / STEPS
        found: dict[str, Any] = {
            "s_per_step": statistics.median(call["since_last_ms"] for call in settled) / 1000,
            "host_s": statistics.median(call["host_ms"] for call in settled) / 1000,
            "bytes_per_step": timed["not_resident_bytes"] if self._contender == STOCK else streamed,
            "not_resident_bytes": timed["not_resident_bytes"],
            "first_step_s": first["calls"][1]["since_last_ms"] / 1000,
            "steps_s": [round(call["since_last_ms"] / 1000, 4) for call in timed["calls"][1:]],
            "bypasses": rig.rise(before, after)["bypasses"],
            "replays": after["replays"] - timed_before["replays"],
            "prologues": after.get("prologue_runs", 0) - timed_before.get("prologue_runs", 0),
            "regions_compiled": after["region_compiles"] - before["region_compiles"],
        }
        if self._contender == OURS:
            found["resolute_log"] = self._log()
        found |= {} if self.memory is None else self.memory.take()
        if self._contender == OURS:
            _, stock_history = self._prompt(STEPS, 2, STOCK)
            ours, stock = (rig.latents(self._server.client, each) for each in (timed_history, stock_history))
            found["error"] = rig.error(ours, stock)
        return found

    def _prompt(self, steps: int, seed: int, contender: str | None = None) -> tuple[dict[str, Any], Any]:
        """The notes of each call, and the prompt's history. Raises OutOfTimeError."""
        contender = contender or self._contender
        left = self._options.deadline - time.monotonic()
        if left < 1:
            raise OutOfTimeError
        name = self._model.name
        nodes = families.prompt(name, self._family, contender, self._family.sizes[0], "default", steps, seed)
        nodes["load"]["inputs"]["unet_name"] = file_of(name, self._model.form)
        sampler, file = nodes["sample"]["inputs"], f"steps-{contender}-{seed}"
        watch = {"name": file, "calls": steps}
        nodes["watch"] = rig.node("ResoluteBenchmarkSteps", model=sampler["model"], **watch)
        sampler["model"] = ["watch", 0]
        if self._options.cpu and contender == OURS:
            nodes["stream"] = rig.node("ResoluteTestStreams", model=["load", 0])
            nodes["compile"]["inputs"]["model"] = ["stream", 0]
        try:
            history = self._server.client.run(nodes, left)
        except ServerError as error:
            if time.monotonic() >= self._options.deadline - 1:
                raise OutOfTimeError from error
            raise
        notes: dict[str, Any] = json.loads((self._server.folder / "output" / f"{file}.json").read_text("utf-8"))
        return notes, history

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


def visit(name: str, contender: str, cell: str, setup: command.Setup, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured in a server of its own. Resolute's first servers only compile, and tell what that took."""
    variables = {key: str(options.folder / key.lower()) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    variables |= {"RESOLUTE_STORE": str(options.folder / "store")}
    variables |= {"RESOLUTE_BUDGET_MB": str(default_budget(24 * GIB) >> 20)}
    is_compiled = contender == STOCK or _mark(name, options).exists()
    variables |= {"RESOLUTE_WORKERS": "0"} if is_compiled else {}
    variables |= dict(each.split("=", 1) for each in options.environment)
    server = rig.server(
        setup, options.folder / "server", options.argument, models=options.folder, cpu=options.cpu,
        environment=variables, packs={"step-watch": ROOT / "benchmarks" / "step_watch"},
    )  # fmt: skip
    about: dict[str, Any] = {}
    try:
        with small_card(None if cell == ALL or options.cpu else float(cell)), server:
            about = environment(server)
            bench = Bench(server, MODELS[name], contender, options)
            try:
                found = bench.measure() if is_compiled else bench.compile()
            finally:
                bench.close()
                log = options.folder / f"{name}-{contender}-{cell}.log"
                log.write_text(server.log(), "utf-8")
    except (PromptError, ServerError) as error:
        found = {"failed": str(error).splitlines()[0][:300]}
    return {**found, "about": about}


def _mark(name: str, options: argparse.Namespace) -> Path:
    """This file exists once what a model needs is compiled, under these variables."""
    return options.folder / "-".join(["compiled", name, *sorted(options.environment)])


def _make(name: str, setup: command.Setup, options: argparse.Namespace) -> Path:
    model = MODELS[name]
    file: Path = options.folder / "diffusion_models" / file_of(model.name, model.form)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < _LEAST_DISK:
            for other in file.parent.glob("*.safetensors"):
                other.unlink()
                other.with_suffix(".json").unlink()
        child = [str(setup.python), "-m", "benchmarks.streamed", "--make", str(file.parent), str(setup.comfyui)]
        subprocess.run([*child, "--cells", f"{name}:0", *(["--cpu"] if options.cpu else [])], cwd=ROOT, check=True)
    return file


def measure_all(setup: command.Setup, options: argparse.Namespace) -> None:
    kept = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    measured: dict[str, Any] = kept.pop("measured", {})
    gb: dict[str, float] = kept.get("gb", {})
    about: dict[str, Any] = {**kept, "arguments": without_paths(options.argument), "environment": options.environment}
    about |= {"steps": STEPS, "is_cpu": options.cpu, "gb": gb}
    about.setdefault("bus_gb_per_s", None if options.cpu else bus_gb_per_s())
    try:
        for name in MODELS:
            wanted = [free for each, _, free in (cell.partition(":") for cell in options.cells) if each == name]
            wanted = sorted(wanted, key=float, reverse=True)
            wanted = [*([] if options.no_resident else [ALL]), *wanted] if wanted else []
            left = {
                who: [free for free in wanted if "s_per_step" not in measured.get(name, {}).get(who, {}).get(free, {})]
                for who in options.contenders
            }
            if not any(left.values()):
                continue
            first = next(free for free in wanted if free != ALL)
            file = _make(name, setup, options)
            gb[name] = round(file.stat().st_size / 1e9, 2)
            for who, cells in left.items():
                if cells and who == OURS and not _mark(name, options).exists():
                    compiling = list(dict.fromkeys([cells[0], first]))
                    for free in compiling:
                        found = visit(name, who, free, setup, options)
                        found.pop("about")
                        about.setdefault("compiled", {}).setdefault(name, {})[free] = found
                        print(compiled_line(name, free, found), flush=True)
                    _mark(name, options).touch()
                for free in cells:
                    found = visit(name, who, free, setup, options)
                    about |= found.pop("about")
                    measured.setdefault(name, {}).setdefault(who, {})[free] = found
                    rows = rows_of(measured, gb, about["bus_gb_per_s"])
                    rig.save(options.out, {**about, "rows": rows, "measured": measured})
                    print(line(next(row for row in rows if row["model"] == name and _free(row) == free)), flush=True)
    except OutOfTimeError:
        print(f"{options.seconds:.0f} s are over: begin again for what is missing", flush=True)
    finally:
        rows = rows_of(measured, gb, about["bus_gb_per_s"])
        print("\n".join([f"bus {about['bus_gb_per_s']} GB/s", HEAD, *map(line, rows)]))


def _free(row: dict[str, Any]) -> str:
    return ALL if row["free_gib"] is None else str(row["free_gib"])


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=CELLS, metavar="MODEL:GIB")
    parser.add_argument("--contenders", nargs="*", choices=(STOCK, OURS), default=[OURS, STOCK])
    parser.add_argument("--seconds", type=float, default=500, help="end after this time, with what there is")
    parser.add_argument("--no-resident", action="store_true", help="leave out the cells with all memory")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--environment", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--folder", type=Path, help="keeps models and compiled regions")
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU, to check this script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", nargs=2, type=Path, metavar=("FOLDER", "COMFYUI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {cell.partition(":")[0] for cell in options.cells} - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(MODELS)}")
    if options.make:
        for model in (MODELS[cell.partition(":")[0]] for cell in options.cells):
            make_all(options.make[1], options.make[0], [model.name], options.cpu, [model.form])
        return 0
    options.deadline = started + options.seconds
    with tempfile.TemporaryDirectory(prefix="resolute-streamed-") as work:
        options.folder = options.folder or Path(work)
        options.folder.mkdir(parents=True, exist_ok=True)
        measure_all(command.prepare(), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
