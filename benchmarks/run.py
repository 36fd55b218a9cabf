"""Measure a scenario of `benchmarks.scenarios`: models at some sizes, with Resolute and with stock ComfyUI.

    python -m benchmarks.run NAME --out benchmarks/results/FILE.json [--model sdxl flux:fp8-scaled@12 ...]
                                  [--contenders resolute stock ...] [--sizes 2] [--lora] [--seconds 300] [--cpu]
                                  [--models FOLDER] [--folder FOLDER] [--environment NAME=VALUE] [--argument=--ARG]
                                  [--gguf-pack FOLDER] [--packages FOLDER]

An option takes the place of what the scenario says. flux@12 is a model on a card on which other memory is held, so
that 12 GiB are free. A row is a model at a size, and has the figures of each contender of CONTENDERS, ours first:

    seconds, one_step_seconds   of whole prompts with different seeds, and of prompts of one step
    first_s, wait_s, steady_s   of the first prompt, how much longer it was, and the median of the last `--repeats`
    ms                          of a step: (steady_s - prompt of one step) / (steps - 1)
    error, error_one_step       of the latents, against the reference that computes in float32, or against stock
    peak_gib, host_gib          what the server held at most on the device and in its process, in this row
    counters, bypasses          by how much Resolute's counters rose; capture_mib: what all captures hold
    after_unload_gib, after_free_gib   what it still held after ComfyUI's Unload and Free, in its last row

`floor_ms`: the matrix products and the attention of a step at FLOOR_TFLOPS. `lora`: what four prompts counted, with a
LoRA, with another strength, once more, and without. With all memory free the contenders share a server. With less each
has a server of its own with the budget of such a card, and a server before it compiles (`cold`); so it is after a
restart (`--restart`), where each contender also begins with nothing on disk. A prompt that fails is a result.

A run begins nothing that would end after `--seconds`, writes after each contender's size, and goes on with what `--out`
lacks. `--folder` keeps compiled regions and latents, `--models` the models, several GB each. Needs CUDA and the
environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH). GGUF needs a clone of
https://github.com/city96/ComfyUI-GGUF and the package gguf. `--cpu` goes the whole way with small models.
With `--environment TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1` compiled kernels round where ComfyUI's own do.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

from scripts.errors import as_command
from scripts.setup import command

from . import gguf_file, rig, workloads
from .card_memory import used_bytes
from .cells import Cells, add_options
from .run_table import table
from .runner import FLOOR_TFLOPS, Runner, key_of
from .scenarios import SCENARIOS
from .servers import Servers
from .weight_formats import FORMATS
from .workloads import CONTENDERS


def parse() -> argparse.Namespace:
    """The options, each of which the scenario says where it is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--model", nargs="*", help="names; flux:fp8-scaled@12: a format, with 12 GiB free")
    parser.add_argument("--contenders", nargs="*", choices=list(CONTENDERS))
    parser.add_argument("--sizes", type=int, help="visit so many of each model")
    parser.add_argument("--repeats", type=int, default=2, help="steady prompts of each size")
    parser.add_argument("--lora", action="store_true", help="transformers also with a LoRA")
    parser.add_argument("--restart", action="store_true", help="each contender cold, and after a restart")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="for ComfyUI")
    parser.add_argument("--gguf-pack", type=Path, metavar="FOLDER", help="the nodes of ComfyUI-GGUF, for rows in GGUF")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="Python packages that the environment lacks")
    add_options(parser, cpu="small models")
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    options.model = options.model or list(scenario.models)
    options.contenders = options.contenders or list(scenario.contenders)
    options.sizes = options.sizes or scenario.sizes
    options.restart = options.restart or scenario.is_restart
    options.lora = options.lora or scenario.with_lora
    options.contenders = [each for each in options.contenders if each != "cudagraph" or not options.cpu]
    options.argument = [*scenario.arguments, *options.argument]
    if unknown := [name for name in options.model if not workloads.known(name)]:
        parser.error(f"no model or format is called {', '.join(unknown)}")
    return options


def main() -> int:
    options = parse()
    setup = command.prepare()
    if any(FORMATS[form].gguf for name in options.model if (form := name.partition("@")[0].partition(":")[2])):
        gguf_file.require(setup.python, options.gguf_pack, options.packages)
    with tempfile.TemporaryDirectory(prefix="resolute-run-", ignore_cleanup_errors=True) as work:
        options.folder = (options.folder or Path(work)).resolve()
        options.models = (options.models or options.folder / "models").resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        return run(setup, options)


def run(setup: command.Setup, options: argparse.Namespace) -> int:
    """Measure what the file lacks, model by model. Returns 1 if a cell failed."""
    cells = Cells(options, key_of)
    cells.about |= {"scenario": options.scenario, "arguments": rig.without_paths(options.argument)}
    cells.about |= {"environment": options.environment, "floor_tflops": FLOOR_TFLOPS, "is_cpu": options.cpu}
    cells.about["cold"] = cells.before.get("cold", {})
    used_bytes()  # this process's own context counts in every measurement alike
    servers = Servers(setup, options)
    try:
        for cell in options.model:
            name, _, free = cell.partition("@")
            runner = Runner(servers, cells, options)
            if runner.lacks(name, float(free) if free else None):
                runner.files = workloads.make(setup, options.models, [name], options.cpu, options.packages)
                cells.measure(cell, functools.partial(runner.rows, name, float(free) if free else None))
    finally:
        servers.close()
        cells.save()
        print(f"\n{table(cells.rows)}", flush=True)
    return 1 if cells.failed else 0


if __name__ == "__main__":
    sys.exit(as_command(main))
