"""One trace of prompts through a fleet, with our router and with Serve's: the share of warm prompts, and seconds.

    python -m benchmarks.fleet --out benchmarks/results/NAME-fleet.json [--replicas 2] [--prompts 200] [--seconds 420]
                               [--checkpoints 4] [--fit 2] [--folder FOLDER] [--cpu] [--steps 8]

12 sizes and four checkpoints (one SDXL file under four names, random weights), from eight clients. Another process
occupies memory of each GPU, so that `--fit` checkpoints fit at once beside the work of its replicas. The probability of
a size falls from the first to the last, as with people's sizes. Every router gets the same trace, a fresh fleet, and a
copy of one store in which the regions are compiled already; so a cold prompt loads regions or captures. `--cpu` uses
the tests' tiny models and eight small sizes. The routers share `--seconds` evenly, including their startup, but each
gets at least 100 s; prompts that did not fit are skipped and counted. A later run with the same `--out` measures the
missing routers; `--folder` keeps the store. `--gpus 0.5` lets two replicas share one GPU. Needs Ray in this Python
(requirements/fleet.txt). COMFYUI_PATH and RESOLUTE_PYTHON name ComfyUI and its Python, as for the other benchmarks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from scripts.errors import PromptError, ServerError
from scripts.models import generated
from scripts.places import ROOT
from scripts.server.client import Client
from scripts.server.process import CPU_ARGUMENTS, MODEL_FOLDERS, link
from scripts.serving.config import ROUTERS
from scripts.setup import comfyui

from . import ballast, rig
from .cells import Cells, OutOfTimeError

CLIENTS = 8
CHECKPOINT_GIB = 6.5  # of SDXL in float16: UNet 4.8, text encoders 1.5, VAE 0.2
WORK_GIB = 6.0  # of a replica, beside models: its CUDA context, a decode of 1280x1280, captures
_LEAST_SECONDS = 100.0  # per router: starting its fleet, and a minute of prompts
_END_SECONDS = 20.0  # from the last prompt that is sent to the end of a fleet
PORT = 18188
SIZES = [
    (1024, 1024), (960, 720), (896, 768), (720, 720), (1280, 1280), (512, 2048), (1152, 896), (768, 1344),
    (640, 640), (1216, 832), (832, 1216), (720, 960),
]  # fmt: skip
SMALL = [(128, 128), (160, 128), (128, 192), (192, 192), (256, 128), (128, 256), (192, 160), (160, 224)]
PACKS = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack"}


def trace(options: argparse.Namespace, seed: int = 1) -> list[dict[str, Any]]:
    """The prompts, in order."""
    chooser = random.Random(seed)
    sizes = SMALL if options.cpu else SIZES
    weights = [1 / (rank + 1) for rank in range(len(sizes))]
    drawn = [
        (*chooser.choices(sizes, weights)[0], chooser.randrange(options.checkpoints)) for _ in range(options.prompts)
    ]
    return [prompt(options, *each, seed=index) for index, each in enumerate(drawn)]


def prompt(options: argparse.Namespace, width: int, height: int, model: int, seed: int) -> dict[str, Any]:
    """A compiled text-to-image prompt. model: the number of its checkpoint."""
    size = (width, height, 1, "a lighthouse")
    nodes = rig.prompt(f"fleet-{model}.safetensors", size, options.steps, seed)
    del nodes["latents"]
    if options.cpu:
        kind, wide, pooled = (("sd", 768, 0), ("sdxl", 2048, 1280))[model % 2]
        text = {"tokens": 77, "width": wide, "pooled_width": pooled, "batch": 1}
        nodes["load"] = rig.node("ResoluteTestTinyModel", seed=model // 2, kind=kind)
        nodes["vae"] = rig.node("ResoluteTestTinyVAE", seed=0)
        nodes["decode"]["inputs"]["vae"] = ["vae", 0]
        for name, number in (("positive", 11), ("negative", 12)):
            nodes[name] = rig.node("ResoluteTestConditioning", seed=number, **text)
    return rig.compiled(nodes, "auto")


class Fleet:
    """`scripts/fleet up` with one router, as a context manager."""

    def __init__(self, options: argparse.Namespace, folder: Path, router: str, replicas: int, store: Path) -> None:
        self.folder, self.client, self._log = folder, Client(f"http://127.0.0.1:{PORT}"), folder / "fleet.log"
        python = os.environ.get("RESOLUTE_PYTHON") or sys.executable
        (folder / "base" / "custom_nodes").mkdir(parents=True)
        for name, source in PACKS.items():
            link(source, folder / "base" / "custom_nodes" / name)
        if store.is_dir():
            shutil.copytree(store, folder / "shared" / "regions")
        paths = {"base_path": str(folder.parent / "models"), **{name: name for name in MODEL_FOLDERS}}
        (folder / "models.yaml").write_text(yaml.safe_dump({"fleet": paths}), "utf-8")
        settings = {
            "comfyui": str(comfyui.ensure(ROOT)), "python": python, "folder": str(folder / "shared"),
            "replicas": replicas, "gpus": 0 if options.cpu else options.gpus, "cpus": 0.5, "port": PORT,
            "router": router,
            "arguments": [
                "--base-directory", str(folder / "base"), "--extra-model-paths-config", str(folder / "models.yaml"),
                *(CPU_ARGUMENTS if options.cpu else ("--disable-api-nodes",)),
            ],
            # ComfyUI's packages may be on this path, where no environment could be made.
            "environment": {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ},
        }  # fmt: skip
        (folder / "fleet.yaml").write_text(yaml.safe_dump(settings), "utf-8")

    def __enter__(self) -> Fleet:
        command = [sys.executable, str(ROOT / "scripts" / "fleet"), "up", "--config", str(self.folder / "fleet.yaml")]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        # `up` logs it when every replica is ready; /ready knows only our router's replicas.
        while "The fleet answers" not in self._log.read_text("utf-8", "replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise ServerError(f"The fleet did not start:\n{self._log.read_text('utf-8', 'replace')[-3000:]}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(120)


def drive(client: Client, prompts: list[dict[str, Any]], deadline: float) -> tuple[dict[str, float], float, list[str]]:
    """Returns the seconds of each prompt by id, the total seconds, and errors. Sends nothing after the deadline."""
    seconds, errors, waiting = dict[str, float](), list[str](), iter(prompts)
    lock = threading.Lock()

    def work() -> None:
        while time.monotonic() < deadline:
            with lock:
                each = next(waiting, None)
            if each is None:
                return
            started = time.perf_counter()
            try:
                prompt_id = client.queue(each)
                client.wait(prompt_id)
                seconds[prompt_id] = time.perf_counter() - started
            except (PromptError, ServerError) as error:
                errors.append(str(error)[:300])

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds, time.perf_counter() - started, errors


def cards(options: argparse.Namespace) -> int:
    """The number of GPUs that the replicas use; 0 on the CPU."""
    return 0 if options.cpu else max(1, math.ceil(options.replicas * options.gpus))


def free_gib(options: argparse.Namespace) -> float | None:
    """The memory in GiB of each GPU that its replicas share; None on the CPU."""
    if options.cpu:
        return None
    return float(options.fit * CHECKPOINT_GIB + math.ceil(options.replicas / cards(options)) * WORK_GIB)


def measure(options: argparse.Namespace, folder: Path, router: str, store: Path, limit: float) -> dict[str, Any]:
    """Measure one router within `limit` seconds, and return its row."""
    deadline = time.monotonic() + limit
    free = free_gib(options)
    python = os.environ.get("RESOLUTE_PYTHON") or sys.executable
    with contextlib.ExitStack() as held:
        for card in range(cards(options)):
            held.enter_context(ballast.occupy_memory(free, python, card=card))
        fleet = held.enter_context(Fleet(options, folder, router, options.replicas, store))
        seconds, whole, errors = drive(fleet.client, trace(options), deadline)
        reports = {each["prompt_id"]: each for each in fleet.client.get("/resolute/fleet")["prompts"]}
    if not seconds and not errors:
        raise OutOfTimeError
    mine = [reports[prompt_id] for prompt_id in seconds if prompt_id in reports]
    warm = [each for each in mine if not each["region_compiles"] + each["region_loads"] + each["captures"]]
    times = sorted(seconds.values())
    return {
        "router": router,
        "replicas": options.replicas,
        "checkpoints": options.checkpoints,
        "free_gib": free,
        "share_warm": round(len(warm) / max(len(mine), 1), 4),
        "p50": round(times[len(times) // 2], 3) if times else None,
        "p95": round(times[int(0.95 * len(times))], 3) if times else None,
        "prompts_per_minute": round(60 * len(times) / whole, 1),
        "stall_seconds": round(sum(each["waited"] for each in mine), 2),
        **{name: sum(each[name] for each in mine) for name in ("region_loads", "captures")},
        "prompts": len(times),
        "left_out": options.prompts - len(times) - len(errors),
        "errors": errors,
        "prompts_of_each_replica": sorted(
            sum(each["replica"] == name for each in mine) for name in {each["replica"] for each in mine}
        ),
        "seconds": [round(each, 3) for each in seconds.values()],
    }


def prepare(options: argparse.Namespace, folder: Path) -> Path:
    """Make the checkpoints, and a store with the regions of both models. Returns the store."""
    store, ready = folder / "first" / "shared" / "regions", folder / "first" / "ready"
    if not options.cpu:
        python = Path(os.environ.get("RESOLUTE_PYTHON") or sys.executable)
        file = generated.ensure("sdxl", python, comfyui.ensure(ROOT))
        (folder / "models" / "checkpoints").mkdir(parents=True, exist_ok=True)
        for number in range(options.checkpoints):
            link(file, folder / "models" / "checkpoints" / f"fleet-{number}.safetensors")
    if ready.exists():
        return store
    empty(folder / "first")
    with Fleet(options, folder / "first", "warm", 1, folder / "none") as fleet:
        width, height = (SMALL if options.cpu else SIZES)[0]
        for number in range(min(2, options.checkpoints)):  # the others have the same regions
            fleet.client.run(prompt(options, width, height, number, seed=10_000 + number))
    ready.touch()
    return store


def empty(folder: Path) -> None:
    """Make an empty folder, deleting an old one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def about(options: argparse.Namespace) -> dict[str, Any]:
    about = {"date": rig.now(), "gpu": "" if options.cpu else rig.gpu()}
    return {**about, "clients": CLIENTS, "steps": options.steps, "comfyui": comfyui.TARGET}


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--fit", type=float, default=2, help="checkpoints that fit into a GPU at once")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--gpus", type=float, default=1.0, help="of each replica")
    parser.add_argument("--folder", type=Path, help="keeps the fleets' folders, with the store")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Measure every router, write the file, print a table. Returns 1 if a router could not be measured."""
    options = parse()
    cells = Cells(options, lambda row: row["router"])
    cells.about |= about(options)
    with tempfile.TemporaryDirectory(prefix="resolute-fleet-") as place:
        folder = options.folder or Path(place)
        wanted = [router for router in ROUTERS if cells.lacks(router)]
        store = prepare(options, folder) if wanted else folder
        share = max(cells.seconds_left / max(len(wanted), 1), _LEAST_SECONDS)  # the same for each
        for router in wanted:
            empty(folder / router)
            one = functools.partial(measure, options, folder / router, router, store, share - _END_SECONDS)
            row = cells.measure(router, one, share - _END_SECONDS)
            if row is not None:
                print({name: value for name, value in row.items() if name != "seconds"}, flush=True)
    names = ("router", "replicas", "prompts", "share_warm", "p50", "p95", "prompts_per_minute", "stall_seconds")
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in cells.rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    return 1 if cells.failed else 0


if __name__ == "__main__":
    sys.exit(main())
