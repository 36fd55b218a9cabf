"""First prompts with nothing on disk: of stock, and of Resolute, which compiles behind the picture or before it.

    python -m benchmarks.first_prompts --out FILE [--model SDXL] [--model Wan] [--contender behind] [--free GIB]
                                       [--folder FOLDER] [--models FOLDER] [--seconds 500] [--commit HASH]
                                       [--argument ...] [--cpu]

A row is a contender with a model. Its prompts differ in their seeds. BUSY of them are sent without a pause. Before each
later one the script waits GAP seconds, the time that people take to look at a picture; it sends them until nothing
ran eagerly in one, and at most MOST. Then come a prompt at a larger size, and one after a restart of the server, which
keeps the store and no other compiled files. A row has the seconds and the counters of each prompt, and

    new_size_seconds, restart_seconds   of these two prompts
    compiled_seconds                    from the first prompt's start until the code of the last region came
    peak_gib                            what the server and its workers held at most in the first prompts

`--free`: other memory is held, so that so many GiB are free, and captures may hold what they may on such a card. The
models are made within `--seconds`; the file is written after each prompt. A later run with the same file measures the
rows that are not complete.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from compile_cache.config import default_budget
from scripts.errors import PromptError, ServerError, as_command
from scripts.places import ROOT
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig, workloads
from .card_memory import GIB, Memory, small_card, used_bytes
from .cells import PARTS, Cells, OutOfTimeError, Row, add_options
from .rig import OURS, STOCK, Size
from .smoke import PAUSE
from .smoke_setup import commit_of

MODELS = {"SDXL": "sdxl", "Flux": "flux", "Z-Image": "z-image", "Wan": "wan"}  # of `workloads`
BEHIND, BEFORE = "behind", "before"
CONTENDERS = (STOCK, BEHIND, BEFORE)
BUSY, GAP, MOST = 3, 8.0, 12
START, FIRST = 20.0, 45.0  # seconds of a slow host for a server's start and the pause, and for the longest first prompt
NEW_SIZE, RESTART = "new_size", "restart"
_MULTIPLE = 64  # pixels: every model takes it


def new_size(size: Size) -> Size:
    """A quarter larger on each side, and up to the next multiple."""
    width, height = (math.ceil(1.25 * side / _MULTIPLE) * _MULTIPLE for side in size[:2])
    return width, height, *size[2:]


def is_complete(contender: str, prompts: list[dict[str, Any]]) -> bool:
    """No more first prompts are needed: there are BUSY, and in the last one nothing waited for code."""
    waits = contender == BEHIND and bool(prompts) and bool(prompts[-1]["counters"]["eager_calls"])
    return len(prompts) >= (MOST if waits else BUSY)


def compiled_seconds(prompts: list[dict[str, Any]], events: list[dict[str, Any]]) -> float | None:
    """From the first prompt's start until the last code came; None where the last prompt still ran eagerly."""
    came = [each["at"] for each in events if each["kind"] == "compile" and each["text"]]  # without a text: a wait
    if not came or prompts[-1]["counters"]["eager_calls"]:
        return None
    return round(came[-1] - prompts[0]["unix"], 1)


def line(row: Row) -> str:
    """A row for people."""
    found = [" ".join(f"{each['seconds']:.2f}" for each in row["prompts"]) or "no prompt"]
    found += [f"new size {row['new_size_seconds']:.2f}"] if "new_size_seconds" in row else []
    found += [f"restart {row['restart_seconds']:.2f}"] if "restart_seconds" in row else []
    found += [f"{row['peak_gib']} GiB"] if "peak_gib" in row else []
    if "compiled_seconds" in row and row["contender"] != STOCK:
        after = row["compiled_seconds"]
        found.append("not all compiled" if after is None else f"compiled after {after} s")
    found += [f"failed: {row['failed']}"] if "failed" in row else []
    return f"{name_of(row)}: {', '.join(found)}"


def name_of(row: Row) -> str:
    free = f", {row['free_gib']:g} GiB free" if row["free_gib"] else ""
    return f"{row['model']} {row['contender']}{free}"


class Contender:
    """Measures one row. before: bytes of the device that were in use before any server."""

    def __init__(self, options: argparse.Namespace, cells: Cells, row: Row, files: dict[str, str], before: int) -> None:
        self._options, self._cells, self._row, self._files, self._before = options, cells, row, files, before
        self._folder: Path = options.folder / name_of(row).replace(",", "").replace(" ", "-")
        self._size = workloads.sizes_of(MODELS[row["model"]], options.cpu)[0]
        self._prompts: list[dict[str, Any]] = row["prompts"]
        self._seed = 0
        self._began = 0.0

    def measure(self, setup: command.Setup) -> None:
        """All prompts, as far as the time goes. Raises OutOfTimeError, PromptError or ServerError."""
        shutil.rmtree(self._folder, ignore_errors=True)
        row, contender = self._row, self._row["contender"]
        server = rig.server(
            setup, self._folder, self._options.argument, models=self._options.models, cpu=self._options.cpu,
            environment=self._environment(),
        )  # fmt: skip
        with self._served(server, FIRST) as memory:
            self._cells.about |= rig.environment(server)
            while not is_complete(contender, self._prompts):
                gap = GAP if len(self._prompts) >= BUSY else 0.0
                self._require(gap + 2 * self._prompts[-1]["seconds"] if self._prompts else FIRST)
                time.sleep(gap)
                self._prompts.append(self._run(server, memory, self._size))
                row["peak_gib"] = round(max(each["device_gib"] for each in self._prompts), 3)
                row["events"] = server.client.get("/resolute/events")["events"]
                self._cells.add(row)
            row["compiled_seconds"] = compiled_seconds(self._prompts, row["events"])
            longest = max(each["seconds"] for each in self._prompts)
            self._require(max(longest, 2 * self._prompts[-1]["seconds"]))
            self._note(NEW_SIZE, server, memory, new_size(self._size))
        shutil.rmtree(self._folder / "inductor", ignore_errors=True)  # it has only what the store keeps
        with self._served(server, longest) as memory:
            self._note(RESTART, server, memory, self._size)

    def _environment(self) -> dict[str, str | None]:
        contender, free = self._row["contender"], self._row["free_gib"]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"), "TRITON_CACHE_DIR": None}
        given = {"RESOLUTE_STORE": str(self._folder / "store"), "RESOLUTE_COMPILE": contender.replace(STOCK, BEFORE)}
        budget = {"RESOLUTE_BUDGET_MB": str(default_budget(int(free * GIB)) >> 20)} if free else {}
        return {**caches, **given, **budget}

    @contextlib.contextmanager
    def _served(self, server: ComfyServer, seconds: float) -> Iterator[Memory]:
        """Run the server and watch its memory. seconds: that its first prompt may take."""
        self._require(START + seconds)
        server.ready_timeout = self._cells.seconds_left
        with server, contextlib.ExitStack() as watching:
            assert server.process is not None
            memory = Memory(psutil.Process(server.process.pid))
            watching.callback(memory.close)
            time.sleep(PAUSE)
            self._began = time.monotonic()
            yield memory

    def _require(self, seconds: float) -> None:
        if self._cells.seconds_left < seconds:
            raise OutOfTimeError

    def _note(self, part: str, server: ComfyServer, memory: Memory, size: Size) -> None:
        """Run the prompt of a part of the row."""
        found = self._run(server, memory, size)
        seen = max((each["at"] for each in self._row["events"]), default=0.0)
        events = [each for each in server.client.get("/resolute/events")["events"] if each["at"] > seen]
        self._row[part] = {**found, "size": size[:3], "events": events}
        self._row[f"{part}_seconds"] = found["seconds"]
        self._row[PARTS].remove(part)
        self._cells.add(self._row)

    def _run(self, server: ComfyServer, memory: Memory, size: Size) -> dict[str, Any]:
        """One prompt: its figures."""
        self._seed += 1
        name, small = MODELS[self._row["model"]], self._options.cpu
        contender = STOCK if self._row["contender"] == STOCK else OURS
        steps = workloads.steps_of(name, small)
        nodes = workloads.prompt(name, contender, size, steps, self._seed, self._files, small)
        memory.take()
        before, at, unix = rig.counters(server.client), time.monotonic() - self._began, time.time()  # unix: as events
        try:
            history = server.client.run(nodes, max(self._cells.seconds_left, 1))
        except ServerError as error:
            if self._cells.seconds_left < 1:
                raise OutOfTimeError from error
            raise
        taken = memory.take()
        taken["device_gib"] = round(taken["device_gib"] - self._before / GIB, 3)
        risen = rig.rise(before, rig.counters(server.client))
        return {"at": round(at, 2), "unix": unix, "seconds": execution_seconds(history), "counters": risen, **taken}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="all without it")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="all without it")
    parser.add_argument("--free", type=float, metavar="GIB", help="hold the rest of the GPU's memory")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; 30 GB")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where git does not know it")
    add_options(parser, seconds=500, cpu="small models")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
    with tempfile.TemporaryDirectory(prefix="resolute-first-", ignore_cleanup_errors=True) as work:
        options.folder = (options.folder or Path(work)).resolve()
        options.models = (options.models or options.folder / "models").resolve()
        return run(command.prepare(), options)


def run(setup: command.Setup, options: argparse.Namespace) -> int:
    """Measure the rows that the file lacks. Returns 1 if one failed."""
    cells = Cells(options, lambda row: (row["model"], row["contender"], row["free_gib"]))
    cells.about |= {**commit_of(ROOT, options.commit), "arguments": rig.without_paths(options.argument)}
    cells.about["is_cpu"] = options.cpu
    wanted = [
        {"model": model, "contender": contender, "free_gib": options.free, "prompts": [], PARTS: [NEW_SIZE, RESTART]}
        for model in options.model or MODELS
        for contender in options.contender or CONTENDERS
    ]
    lacking = [row for row in wanted if cells.lacks((row["model"], row["contender"], row["free_gib"]))]
    names = list(dict.fromkeys(MODELS[row["model"]] for row in lacking))
    files = workloads.make(setup, options.models, names, options.cpu)
    used_bytes()  # this process's own context is no part of what is free
    with small_card(options.free):
        before = used_bytes()
        for row in lacking:
            try:
                Contender(options, cells, row, files, before).measure(setup)
            except OutOfTimeError:
                cells.leave(name_of(row))
            except (PromptError, ServerError) as error:  # the other rows still count
                row["failed"] = cells.failed[name_of(row)] = rig.first_line(error)
                cells.add(row)
                print(error, flush=True)
            print(line(row), flush=True)
    cells.save()
    print("", *map(line, cells.rows), sep="\n", flush=True)
    return 1 if cells.failed else 0


if __name__ == "__main__":
    sys.exit(as_command(main))
