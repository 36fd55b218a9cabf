"""First prompts with nothing on disk: of stock, and of Resolute, which compiles behind the picture or before it.

    python -m benchmarks.first_prompts --out FILE [--model SDXL] [--model Flux] [--contender behind] [--folder FOLDER]
                                       [--models FOLDER] [--seconds 500] [--commit HASH] [--argument ...] [--cpu]

Each contender gets a server of its own. Its prompts differ in their seeds. BUSY of them are sent without a pause.
Before each later one the script waits GAP seconds, the time that people take to look at a picture; it stops after the
first one in which nothing ran eagerly. A row has the seconds of each prompt, the counters, and the peak of the device's
memory, with what the workers hold.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from scripts.errors import PromptError, ServerError, as_command
from scripts.places import ROOT
from scripts.server.client import execution_seconds
from scripts.setup import command

from . import rig
from .card_memory import Memory
from .cells import add_options
from .rig import OURS, STOCK
from .smoke import PAUSE
from .smoke_rows import FLUX, SDXL, Row, prompt, rows
from .smoke_setup import commit_of, make_models

BEHIND, BEFORE = "behind", "before"
BUSY, GAP, MOST = 3, 8.0, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=(SDXL, FLUX), help="SDXL and Flux without it")
    parser.add_argument("--contender", action="append", choices=(STOCK, BEHIND, BEFORE), help="all without it")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; 25 GB")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where git does not know it")
    add_options(parser, seconds=500, cpu="small models")
    options = parser.parse_args()
    if options.folder:
        run(options, options.folder.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="resolute-first-") as folder:
            run(options, Path(folder))
    return 0


def run(options: argparse.Namespace, folder: Path) -> None:
    setup, ends = command.prepare(), time.monotonic() + options.seconds
    models = (options.models or folder / "models").resolve()
    files = make_models(setup, models, options.cpu)
    result: dict[str, Any] = {**commit_of(ROOT, options.commit), "rows": [], "failed": {}}
    wanted = {row.model: row for row in reversed(rows(options.cpu)) if row.model in (options.model or (SDXL, FLUX))}
    for row in wanted.values():
        for contender in options.contender or (STOCK, BEHIND, BEFORE):
            name = f"{row.model} {contender}"
            try:
                measured = _measure(
                    options, setup, folder / name.replace(" ", "-"), models, row, contender, files, ends
                )
                result |= measured.pop("environment")
                result["rows"].append({"model": row.model, "contender": contender, **measured})
                print(
                    name, *[each["seconds"] for each in measured["prompts"]], f"{measured['peak_gib']} GiB", flush=True
                )
            except (PromptError, ServerError) as error:
                result["failed"][name] = rig.first_line(error)
                print(f"{name}: {error}", flush=True)
            rig.save(options.out, result)


def _measure(
    options: argparse.Namespace, setup: command.Setup, folder: Path, models: Path, row: Row, contender: str,
    files: dict[str, str], ends: float,
) -> dict[str, Any]:  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": None}
    given = {**caches, "RESOLUTE_STORE": str(folder / "store"), "RESOLUTE_COMPILE": contender.replace(STOCK, BEFORE)}
    server = rig.server(setup, folder, options.argument, models=models, cpu=options.cpu, environment=given)
    prompts: list[dict[str, Any]] = []
    with server, contextlib.ExitStack() as watching:
        assert server.process is not None
        memory = Memory(psutil.Process(server.process.pid))
        watching.callback(memory.close)
        time.sleep(PAUSE)
        began = time.monotonic()
        for number in range(MOST if contender == BEHIND else BUSY):
            if prompts and ends - time.monotonic() < GAP + 2 * prompts[-1]["seconds"]:
                break
            time.sleep(GAP if number >= BUSY else 0)
            nodes = prompt(row, STOCK if contender == STOCK else OURS, max(row.counts), 1 + number, files, options.cpu)
            before, at = rig.counters(server.client), round(time.monotonic() - began, 2)
            unix = time.time()  # as events have it
            history = server.client.run(nodes, max(ends - time.monotonic(), 1))
            risen = rig.rise(before, rig.counters(server.client))
            prompts.append(
                {"at": at, "unix": unix, "seconds": execution_seconds(history), "counters": risen, **memory.take()}
            )
            if contender == BEHIND and not risen["eager_calls"]:
                break
        peak = max(each["device_gib"] for each in prompts)
        events = server.client.get("/resolute/events")
        return {"prompts": prompts, "peak_gib": peak, "events": events, "environment": rig.environment(server)}


if __name__ == "__main__":
    sys.exit(as_command(main))
