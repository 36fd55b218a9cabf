"""Small cards: stock ComfyUI, its TorchCompileModel, and Resolute on a card of which other memory is held.

    python -m benchmarks.small_cards --out benchmarks/results/NAME-small-cards.json [--cells sdxl:8 sdxl:all flux:12]
                                     [--seconds 480] [--folder FOLDER] [--models FOLDER] [--cpu]
                                     [--contenders inductor stock TorchCompileModel]

A cell is a model and the GiB that are free; "all" holds nothing. In each cell every contender gets a new server: its
first prompt (seconds include loading; regions are on disk from a run before), then the other sizes, then ComfyUI's
Unload and Free. The budget is what a card of that size gets by default. `stock` and `resolute` are the seconds of a
steady prompt, `_first` those of the first prompt of the server, where the row's size came first, and `_peak_gib` what
the server held at most in the row's prompts. `cold` has the run that compiled everything. With --seconds no cell is
begun that would end later, and a later run with the same `--out` measures what it lacks; `--folder` keeps the compiled
regions. Needs CUDA and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH).
`--cpu` checks the script with small models, holds no memory, and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from compile_cache.config import default_budget
from scripts.errors import PromptError, ServerError
from scripts.models import generated
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer, link
from scripts.setup import command

from . import families, rig
from .card_memory import GIB, Memory, small_card, used_bytes
from .cells import Cells, add_options
from .rig import ROOT, STEPS, environment, prompt, without_paths
from .small_cards_table import NAMES, OURS, STOCK, Latents, Size, rows_of, table

CELLS = ["sdxl:12", "sdxl:8", "sdxl:6", "flux:12", "flux:8", "sdxl:16", "sdxl:24", "sdxl:all", "flux:16"]
SIZES: dict[str, list[Size]] = {
    "sdxl": [(1024, 1024, 1), (720, 960, 1), (1536, 1536, 1), (1024, 1024, 2)],
    "flux": [(1024, 1024, 1), (720, 960, 1)],
}
SMALL: list[Size] = [(128, 128, 1), (96, 128, 2)]  # for a run on the CPU
_SETTLED_SECONDS = 1.0


@dataclass(frozen=True)
class Cell:
    """A model and the GiB of the card that are free (None: nothing is held)."""

    kind: str
    free: float | None

    @staticmethod
    def named(name: str) -> Cell:
        kind, _, free = name.partition(":")
        if kind not in SIZES:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(SIZES)}")
        return Cell(kind, None if free == "all" else float(free))

    def __str__(self) -> str:
        return f"{self.kind}:{'all' if self.free is None else f'{self.free:g}'}"

    @property
    def budget(self) -> dict[str, str]:
        """The variable that limits captures to what a card of this size gets by default."""
        return {} if self.free is None else {"RESOLUTE_BUDGET_MB": str(default_budget(int(self.free * GIB)) >> 20)}


class Run:
    """Measures one contender in a server of its own."""

    def __init__(self, server: ComfyServer, files: dict[str, str], options: argparse.Namespace, before: int) -> None:
        """before: bytes of the device that were in use before the server started."""
        assert server.process is not None
        self._client, self._files, self._options, self._before = server.client, files, options, before
        self._memory = Memory(psutil.Process(server.process.pid))

    def close(self) -> None:
        self._memory.close()

    def sizes(self, kind: str, contender: str, sizes: list[Size]) -> Iterator[dict[str, Any]]:
        """Each size: one prompt more than `repeats`, the first of which is not steady. Ends at an error."""
        for size in sizes:
            runs: list[dict[str, Any]] = []
            result: dict[str, Any] = {"size": f"{size[0]}x{size[1]}", "batch": size[2], "runs": runs}
            try:
                for seed in range(1, self._options.repeats + 2):
                    runs.append(self._one(kind, contender, size, seed))
                result["seconds"] = statistics.median(each["seconds"] for each in runs[1:])
            except (PromptError, ServerError) as error:
                result["failed"] = str(error).splitlines()[0][:300]
            result["peak_gib"] = max((each["peak_gib"] for each in runs), default=None)
            yield result
            if "failed" in result and "had not finished" in result["failed"]:
                return

    def _one(self, kind: str, contender: str, size: Size, seed: int) -> dict[str, Any]:
        width, height, batch = size
        if kind == "sdxl":
            nodes = prompt(self._files[kind], contender, (width, height, batch, "a lighthouse"), STEPS, seed)
        else:
            made = families.family(kind, self._options.cpu)
            nodes = families.prompt(kind, made, contender, (width, height), "default", STEPS, seed)
        self._memory.take()
        before = rig.counters(self._client)
        history = self._client.run(nodes, self._options.prompt_seconds)
        after = self._client.get("/resolute/cache")
        risen = rig.rise(before, after["counters"])
        return {
            "seconds": execution_seconds(history),
            "peak_gib": round(self._memory.take()["device_gib"] - self._before / GIB, 3),
            "capture_mib": after["bytes"] >> 20,
            "latents": rig.latents(self._client, history),
            **{name: risen[name] for name in ("captures", "replays", "region_compiles", "evictions")},
            "stall": round(risen["stall_seconds"], 3),
            "bypasses": risen["bypasses"],
        }

    def give_back(self) -> dict[str, Any]:
        """GiB that the server still holds after ComfyUI's Unload and after its Free, on the device and in torch."""
        found: dict[str, Any] = {}
        for name, body in (("unload", {"unload_models": True}), ("free", {"unload_models": True, "free_memory": True})):
            self._client.post("/free", body)
            found[f"after_{name}_gib"] = round((self._settled() - self._before) / GIB, 3)
            torch_bytes = self._client.get("/system_stats")["devices"][0]["torch_vram_total"]
            found[f"torch_after_{name}_gib"] = round(torch_bytes / GIB, 3)
        return found

    def _settled(self) -> int:
        """Bytes in use, once they have stayed the same for _SETTLED_SECONDS. ComfyUI frees after it has answered."""
        time.sleep(_SETTLED_SECONDS)
        used, since = used_bytes(), time.monotonic()
        while time.monotonic() - since < _SETTLED_SECONDS:
            time.sleep(0.05)
            now = used_bytes()
            if now != used:
                used, since = now, time.monotonic()
        return used


def sizes_of(kind: str, options: argparse.Namespace) -> list[Size]:
    return SMALL if options.cpu else SIZES[kind]


def measure(
    cell: Cell, contender: str, setup: command.Setup, files: dict[str, str], options: argparse.Namespace, only: int = 99
) -> dict[str, Any]:
    """One server: the first `only` sizes of the cell, then Unload and Free."""
    where = options.folder / ("stock" if contender != OURS else "resolute")
    caches = {name: str(options.folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    variables = {**caches, **cell.budget}
    server = rig.server(setup, where, options.argument, models=options.models, environment=variables, cpu=options.cpu)
    before = used_bytes()
    with server:
        run = Run(server, files, options, before)
        try:
            sizes = list(run.sizes(cell.kind, contender, sizes_of(cell.kind, options)[:only]))
            return {"sizes": sizes, "about": environment(server), **run.give_back()}
        except ServerError as error:  # the server ended, and its log says why
            return {"sizes": [], "failed": f"{error}: {server.log_tail(5)}"}
        finally:
            run.close()
            (where / f"{cell.kind}-{cell.free}-{contender}.log").write_text(server.log())


def prepare(kinds: set[str], setup: command.Setup, options: argparse.Namespace) -> dict[str, str]:
    """Make the models; returns the names of their files."""
    files = {}
    if "sdxl" in kinds:
        made = generated.ensure("sd15-mini" if options.cpu else "sdxl", setup.python, setup.comfyui)
        link(made, options.models / "checkpoints" / made.name)
        files["sdxl"] = made.name
    if "flux" in kinds:
        folder = options.models / "diffusion_models"
        make = [str(setup.python), "-m", "benchmarks.families", "--make", str(folder), str(setup.comfyui)]
        subprocess.run([*make, "--family", "flux", *(["--cpu"] if options.cpu else [])], cwd=ROOT, check=True)
        files["flux"] = families.file_of("flux")
    return files


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["free_gib"], row["size"], row["batch"]


def measure_cells(setup: command.Setup, options: argparse.Namespace) -> None:
    cells = Cells(options, key_of)
    cells.about |= {"arguments": without_paths(options.argument), "steps": STEPS, "repeats": options.repeats}
    cells.about |= {"cards": cells.before.get("cards", {}), "cold": cells.before.get("cold", {}), "is_cpu": options.cpu}
    wanted = [cell for cell in options.cells if any(cells.lacks(key) for key in keys_of(cell, options))]
    files = prepare({cell.kind for cell in wanted}, setup, options)
    used_bytes()  # this process's own context counts in every measurement alike
    for kind in files:
        if OURS in options.contenders and not (options.folder / f"compiled-{kind}").exists():
            compile_all(kind, setup, files, options, cells)
    for cell in wanted:
        cells.measure(str(cell), functools.partial(_measure_cell, cell, setup, files, options, cells), 130)
    print(table(cells.rows))


def keys_of(cell: Cell, options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """The keys of a cell's rows."""
    return [(cell.kind, cell.free, f"{width}x{height}", batch) for width, height, batch in sizes_of(cell.kind, options)]


def compile_all(
    kind: str, setup: command.Setup, files: dict[str, str], options: argparse.Namespace, cells: Cells
) -> None:
    """The run that compiles all regions of a model."""
    with small_card(options.cold_free):
        cold = measure(Cell(kind, options.cold_free), OURS, setup, files, options, only=1)
    for each in (run for size in cold["sizes"] for run in size["runs"]):
        del each["latents"]
    first = [(size["size"], round(size["runs"][0]["seconds"], 2)) for size in cold["sizes"] if size["runs"]]
    print(f"cold {kind}: {first}, peak {[size['peak_gib'] for size in cold['sizes']]} GiB", flush=True)
    (options.folder / f"compiled-{kind}").touch()
    cells.save(cold={**cells.about["cold"], kind: {"free_gib": options.cold_free, **cold}})


def _measure_cell(
    cell: Cell, setup: command.Setup, files: dict[str, str], options: argparse.Namespace, cells: Cells
) -> Iterator[dict[str, Any]]:
    """All contenders on one card, ours first. Yields all rows after each."""
    with small_card(cell.free):
        found: dict[str, Any] = {}
        latents: Latents = {}
        for contender in options.contenders:
            found[contender] = measure(cell, contender, setup, files, options)
            yield from _rows(cell, found, latents, options, cells)


def _rows(
    cell: Cell, found: dict[str, Any], latents: Latents, options: argparse.Namespace, cells: Cells
) -> list[dict[str, Any]]:
    cells.about |= next((each.pop("about") for each in found.values() if "about" in each), {})
    rows = rows_of(cell.kind, cell.free, sizes_of(cell.kind, options), found, latents)
    given = {
        f"{NAMES[contender]}_{name}": value
        for contender, each in found.items()
        for name, value in each.items()
        if name.endswith("_gib") or name == "failed"
    }
    budget = int(cell.budget.get("RESOLUTE_BUDGET_MB", 0)) or None
    cells.about["cards"] = {**cells.about["cards"], str(cell): {**given, "budget_mib": budget}}
    print(table(rows), given, flush=True)
    for row in rows:
        missing = [NAMES[each] for each in options.contenders if row.get(NAMES[each]) is None]
        row |= {"failed": f"no figure of {', '.join(missing)}"} if missing else {}  # a later run tries again
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", type=Cell.named, default=[Cell.named(name) for name in CELLS])
    parser.add_argument("--contenders", nargs="*", choices=list(NAMES), default=[OURS, STOCK])
    parser.add_argument("--repeats", type=int, default=2, help="steady prompts of each size")
    parser.add_argument("--prompt-seconds", type=float, default=300.0, help="a prompt that takes longer failed")
    parser.add_argument("--cold-free", type=float, help="GiB that are free in the run that compiles")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    add_options(parser, cpu="small models")
    options = parser.parse_args()
    options.folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-small-cards-"))
    options.models = options.models or options.folder / "models"
    for folder in ("checkpoints", "diffusion_models"):
        (options.models / folder).mkdir(parents=True, exist_ok=True)
    measure_cells(command.prepare(), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
