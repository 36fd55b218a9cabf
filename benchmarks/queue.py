"""A queue of prompts, as users send them: to Resolute, and then to stock ComfyUI.

    python -m benchmarks.queue --out FILE [--model SDXL] [--case restart] [--contender cudagraph] [--prompts 8]
                               [--stock-first] [--environment NAME=VALUE] [--folder FOLDER] [--models FOLDER]
                               [--seconds 500] [--commit HASH] [--argument ...] [--cpu]

A row is one case with one contender and one model. Each prompt has its own seed and is sent after the previous one
ended, the first one when the server answers. Two models run in turn. Only SDXL runs more than the first case, others
the small cards that `--case` names:

    queue            an empty store
    restart          a new server with the store of `queue`, and no other compiled files
    restart-lacking  the same without three regions of the diffusion model; compared with stock's `restart`
    pauses           as queue, with 8 seconds before each prompt
    free-12 (-8, -6) as queue, with 12, 8 or 6 GiB free and the capture budget of such a card

A prompt has its `model`, `seconds` from sending it to its end (`execution`: measured by ComfyUI), and `clock`: from
sending the row's first one. `tier`: 2 if no call ran eagerly, 1 if captures of eager code were replayed, 0 at ComfyUI's
own speed. `error`: of its latents to stock's, once both ran. `compiled_clock`: from sending the first prompt until the
last region was compiled, None if one is missing. The file is written after each prompt. A later run measures the rows
that are not complete, and needs the same `--folder` for errors and restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import psutil

from compile_cache.config import default_budget
from scripts.errors import ServerError, as_command
from scripts.places import ROOT
from scripts.server.client import Client, History, execution_seconds
from scripts.setup import command

from . import rig, workloads
from .card_memory import GIB, Memory, small_card, used_bytes
from .cells import PARTS, Cells, OutOfTimeError, Row, add_options
from .random_lora import write_lora
from .rig import OURS, STOCK, commit_of

MODELS = {
    "SDXL": ("sdxl",), "Flux": ("flux",), "Flux fp8": ("flux:fp8-scaled",), "Z-Image": ("z-image",),
    "Qwen-Image": ("qwen-image",), "Wan": ("wan",), "SDXL and Flux": ("sdxl", "flux"),
}  # fmt: skip
QUEUE, RESTART, LACKING, PAUSES = "queue", "restart", "restart-lacking", "pauses"
PAUSE, FREE = 8.0, {"free-12": 12.0, "free-8": 8.0, "free-6": 6.0}  # seconds, and GiB
CASES = {QUEUE: 24, RESTART: 8, LACKING: 8, PAUSES: 8} | dict.fromkeys(FREE, 10)  # prompts, from the first
START, FIRST, EACH = 20.0, 30.0, 4.0  # seconds on a slow host: server start, all prompts at least, each prompt
RESTARTS, REMOVED = (RESTART, LACKING), 3
_OF_UNET = ("BasicTransformerBlock", "ResBlock", "SpatialTransformer", "UNetModel")  # prefixes of its regions' labels


def tier_of(contender: str, risen: dict[str, Any]) -> int | None:
    """The tier of a prompt, from its counters; None without Resolute."""
    if not workloads.CONTENDERS[contender].backend:
        return None
    originals, waiting, replays = risen.get("original_replays", 0), risen["waiting_calls"], risen["replays"]
    if not originals and not waiting and replays + risen["graph_calls"]:
        return 2
    return 1 if originals and waiting < replays else 0


def compiled_clock(row: Row) -> float | None:
    """The `compiled_clock` of a row with prompts and events (an event without text is a wait); 0 without compiles."""
    if row["coming"].get("regions") or not row["prompts"] or row["prompts"][-1]["tier"] != 2:
        return None
    came: list[float] = [each["at"] for each in row["events"] if each["kind"] == "compile" and each["text"]]
    return float(round(max(0.0, max(came, default=0.0) - row["prompts"][0]["unix"]), 1))


def removed(store: Path) -> list[Path]:
    """The first REMOVED region files of the UNet, by name."""
    files = sorted(store.glob("*/*.region"), key=lambda file: file.name)
    labels = [json.loads(file.read_bytes().partition(b"\n")[0])["label"] for file in files]
    return [file for file, label in zip(files, labels, strict=True) if label.startswith(_OF_UNET)][:REMOVED]


def key_of(row: Row) -> tuple[str, str, str]:
    return row["model"], row["contender"], row["case"]


def stock_key(row: Row) -> tuple[str, str, str]:
    """The key of stock's row with which a row is compared."""
    return row["model"], STOCK, RESTART if row["case"] == LACKING else row["case"]


def line(row: Row, stock: Row | None = None) -> str:
    """A row as text for people: seconds and tier of each prompt, and the speedup over stock."""
    prompts, seconds = row["prompts"], [each["seconds"] for each in row["prompts"]]
    found = [" ".join(f"{each['seconds']:.2f}/{each['tier']}".removesuffix("/None") for each in prompts) or "no prompt"]
    theirs = [each["seconds"] for each in stock["prompts"][: len(seconds)]] if stock and stock is not row else []
    for name, of in (("total", sum), ("median", statistics.median)) if seconds else ():
        ratio = f" ({of(theirs) / of(seconds):.2f} x)" if len(theirs) == len(seconds) else ""
        found.append(f"{name} {of(seconds):.2f}{ratio}")
    errors = [each["error"] for each in prompts if each["error"] is not None]
    found += [f"error {max(errors):.1e}"] if errors else []
    found += [f"compiled after {row['compiled_clock']} s"] if row.get("compiled_clock") is not None else []
    return f"{' '.join(key_of(row))}: {', '.join(found)}, {row.get('peak_gib', 0)} GiB"


class Queue:
    """Measures one row. files: the names of the checkpoint and of the LoRA."""

    def __init__(
        self, setup: command.Setup, options: argparse.Namespace, cells: Cells, row: Row, files: dict[str, str]
    ) -> None:
        self._setup, self._options, self._cells, self._row, self._case = setup, options, cells, row, row["case"]
        self._wanted = workloads.queue(MODELS[row["model"]], options.cpu)[: min(CASES[self._case], options.prompts)]
        self._nodes = [
            workloads.nodes_of(each, row["contender"], 1 + number, files, options.cpu)
            for number, each in enumerate(self._wanted)
        ]
        self._folder = place_of(options, row, QUEUE if self._case in RESTARTS else self._case)
        self._pause = PAUSE if self._case == PAUSES else 0.0
        self.guess = START + max(FIRST, len(self._wanted) * (EACH + self._pause))  # seconds

    def measure(self) -> Row:
        """Run all prompts that fit into the time. Raises OutOfTimeError, PromptError or ServerError."""
        row, cells, options = self._row, self._cells, self._options
        has_store = self._folder.is_dir() and not cells.lacks((row["model"], row["contender"], QUEUE))
        if self._case in RESTARTS and row["contender"] != STOCK and not has_store:
            raise OutOfTimeError
        shutil.rmtree(self._folder / "inductor" if self._case in RESTARTS else self._folder, ignore_errors=True)
        for file in removed(self._folder / "store") if self._case == LACKING else ():
            file.unlink()
        row["stored_regions"] = len([*self._folder.glob("store/*/*.region")])
        with small_card(FREE.get(self._case)):
            before = used_bytes()
            server = rig.server(
                self._setup, self._folder, options.argument, models=options.models, cpu=options.cpu,
                environment=self._environment(), ready_timeout=max(cells.seconds_left, 1),
            )  # fmt: skip
            with server:
                assert server.process is not None
                with contextlib.closing(Memory(psutil.Process(server.process.pid))) as memory:
                    try:
                        self._run(server.client, memory, before)
                    except ServerError as error:
                        raise (OutOfTimeError() if cells.seconds_left < 1 else error) from None
                    finally:
                        with contextlib.suppress(ServerError):  # it may have ended
                            cells.about |= rig.environment(server)
                            row["coming"] = server.client.get("/resolute/cache").get("coming") or {}
                            row["events"] = server.client.get("/resolute/events")["events"]
                            row["compiled_clock"] = compiled_clock(row)
                            cells.add(row)
        return row

    def _environment(self) -> dict[str, str | None]:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"), "TRITON_CACHE_DIR": None}
        own = {"RESOLUTE_STORE": str(self._folder / "store"), "RESOLUTE_COMPILE": None}  # None unsets `rig`'s value
        free = FREE.get(self._case)
        budget = {"RESOLUTE_BUDGET_MB": str(default_budget(int(free * GIB)) >> 20)} if free else {}
        return {**caches, **own, **budget, **rig.variables(self._options.environment)}

    def _run(self, client: Client, memory: Memory, before: int) -> None:
        """Send each prompt after the previous one ended. before: bytes of the device in use without the server."""
        prompts, counters = self._row["prompts"], rig.counters(client)
        prompt, sent, unix = self._send(client, 0)
        began = sent
        for number, wanted in enumerate(self._wanted):
            history = client.wait(prompt, max(self._cells.seconds_left, 1))
            ended, last, counters, taken = time.monotonic(), counters, rig.counters(client), memory.take()
            taken["device_gib"] = round(taken["device_gib"] - before / GIB, 3)
            risen = rig.rise(last, counters)
            about = {"name": wanted.name, "model": wanted.model, "seed": 1 + number, "unix": unix}
            times = {"execution": execution_seconds(history), "seconds": round(ended - sent, 3)}
            times["clock"] = round(ended - began, 3)
            tier = tier_of(self._row["contender"], risen)
            prompts.append({**about, **times, "tier": tier, "error": None, "counters": risen, **taken})
            is_last = number + 1 == len(self._wanted)
            fits = self._cells.seconds_left >= self._pause + 2 * (ended - sent)
            if fits and not is_last:
                prompt, sent, unix = self._send(client, number + 1)
            self._keep(client, history, number)
            if not fits and not is_last:
                raise OutOfTimeError

    def _send(self, client: Client, number: int) -> tuple[str, float, float]:
        """Queue a prompt. Returns its id and when it was sent, as monotonic time and as Unix time (as in events)."""
        time.sleep(self._pause)
        sent, unix = time.monotonic(), time.time()
        return client.queue(self._nodes[number]), sent, unix

    def _keep(self, client: Client, history: History, number: int) -> None:
        """While the next prompt runs: write the row, save the latents, and compute the errors to stock known by now."""
        row, cells = self._row, self._cells
        row[PARTS] = [each.name for each in self._wanted[number + 1 :]]
        row["peak_gib"] = max(each["device_gib"] for each in row["prompts"])
        cells.add(row)
        found = rig.latents(client, history).astype("float32")
        numpy.save(place_of(self._options, row, f"{self._case}-{number}.npy"), found)
        stock = cells.find(stock_key(row)) or {**row, "prompts": []}
        for each in cells.rows:
            pair = [place_of(self._options, one, f"{one['case']}-{number}.npy") for one in (each, stock)]
            is_there = len(each["prompts"]) > number < len(stock["prompts"]) and all(file.is_file() for file in pair)
            if is_there and each is not stock and stock_key(each) == stock_key(row):
                each["prompts"][number]["error"] = rig.error(*map(numpy.load, pair))


def place_of(options: argparse.Namespace, row: Row, name: str) -> Path:
    """The path of a kept file or folder for a row's model and contender."""
    return Path(options.folder / f"{row['model']}-{row['contender']}-{name}")


def rows_of(options: argparse.Namespace, cells: Cells) -> list[Row]:
    """The rows to measure, in order. If a restart lacks the store of `queue`, `queue` is measured again before it."""
    found: list[Row] = []
    contenders = sorted(options.contender or (OURS, STOCK), key=lambda each: (each == STOCK) != options.stock_first)
    for model, contender in [(model, each) for model in options.model or MODELS for each in contenders]:
        cases = [case for case in CASES if case in (options.case or CASES) and (case, contender) != (LACKING, STOCK)]
        if MODELS[model] != workloads.CHECKPOINTS:
            cases = [case for case in cases if case == QUEUE or (case in FREE and case in (options.case or ()))]
        row = {"model": model, "contender": contender, "case": QUEUE}
        lacking = [case for case in cases if cells.lacks(key_of({**row, "case": case}))]
        is_gone = cells.lacks(key_of(row)) or not place_of(options, row, QUEUE).is_dir()
        if is_gone and contender != STOCK and {*lacking} & {*RESTARTS}:
            lacking = [QUEUE, *(case for case in lacking if case != QUEUE)]
        found += [{**row, "case": case, "prompts": []} for case in lacking]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="all without it")
    parser.add_argument("--case", action="append", choices=list(CASES), help="all without it")
    parser.add_argument("--contender", action="append", choices=list(workloads.CONTENDERS), help="ours and stock")
    parser.add_argument("--prompts", type=int, default=CASES[QUEUE], help="of a row at most")
    parser.add_argument("--stock-first", action="store_true", help="stock comes before ours")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="of the servers")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; 25 GB")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where git does not know it")
    add_options(parser, seconds=500, cpu="small models")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
    with tempfile.TemporaryDirectory(prefix="resolute-queue-", ignore_cleanup_errors=True) as work:
        options.folder = (options.folder or Path(work)).resolve()
        options.models = (options.models or options.folder / "models").resolve()
        return run(command.prepare(), options)


def run(setup: command.Setup, options: argparse.Namespace) -> int:
    """Measure the rows that the file lacks. Returns 1 if one failed."""
    cells = Cells(options, key_of)
    cells.about |= {**commit_of(ROOT, options.commit), "arguments": rig.without_paths(options.argument)}
    cells.about |= {"is_cpu": options.cpu, "environment": options.environment}
    rows = rows_of(options, cells)
    names = list(dict.fromkeys(name for row in rows for name in MODELS[row["model"]]))
    files = workloads.make(setup, options.models, names, options.cpu)
    if "sdxl" in files:
        files["lora"] = f"queue-{files['sdxl']}"
        write_lora(options.models / "checkpoints" / files["sdxl"], options.models / "loras" / files["lora"], 0)
    used_bytes()  # create this process's CUDA context before free memory is measured
    for row in rows:
        queue = Queue(setup, options, cells, row, files)
        cells.measure(" ".join(key_of(row)), queue.measure, queue.guess)
        print(line(row), flush=True)
    cells.save()
    print("", *(line(row, cells.find(stock_key(row))) for row in cells.rows), sep="\n", flush=True)
    return 1 if cells.failed else 0


if __name__ == "__main__":
    sys.exit(as_command(main))
