"""The smoke run for a GPU: checks in four minutes that this code is correct and fast, compared with stock ComfyUI.

    python -m benchmarks.smoke --out FILE [--bundle FILE] [--folder FOLDER] [--models FOLDER] [--seconds 280]
                               [--commit HASH] [--argument ...] [--cpu]
    python -m benchmarks.smoke --page FILE

Three servers, one after the other: Resolute with an empty store, eight prompts back to back, and a step of Flux in bf16
and in scaled fp8; Resolute after that restart, with sizes, a batch, a LoRA, decodes, Flux, and an unload; stock ComfyUI
with the same prompts. Before the first server ends, the run waits at most 120 s until no compile is pending: no row
counts that time, and in the second server all rows run compiled. Stock has its own server, so that captures take no
memory from it; its first prompt counts in two rows. Stock comes last, so that an interrupted run has Resolute's
results. `benchmarks.smoke_checks` has the bounds. A size has two prompts of one step and a whole one: the first is
longer by the wait for a new size, and a step takes (whole - second) / (steps - 1). Each figure is of a single prompt.

`--bundle FILE` carries compiled regions: the run imports the file's regions before the first server starts, so that
nothing may compile, and writes all its regions back. The clock of `--seconds` starts when models and bundle are ready;
rows that cannot fit are left out and never pass. The file is rewritten by each run, after each row.
The exit code is 0 if every check passed. `--commit` names the code where git does not know it. `--page` writes
the table of docs/measured.md from a result. Needs CUDA and the environment of `scripts/test` (without a network, set
RESOLUTE_PYTHON and COMFYUI_PATH). `--cpu` runs all prompts with small models, and judges counters and errors only.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compile_cache.store import bundle as bundles
from scripts.commands.bundle import Place, export_to
from scripts.errors import PromptError, ServerError, SetupError, as_command
from scripts.places import ROOT
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .card_memory import GIB, processes_mib, settled_bytes, used_bytes
from .cells import OutOfTimeError, add_options
from .rig import OURS, STOCK, commit_of
from .smoke_checks import PASS, Check, checks_of, row_checks, summary, table, write_page
from .smoke_rows import BEHIND, COLD, QUEUE, RESTART, UNLOAD, Row, prompt, rows
from .smoke_setup import import_bundle, make_models

SECONDS = 280
STILL = 4.0  # seconds without a change of memory that end an unload, which pauses in between
PAUSE = 5.0  # seconds from a server's start to its first prompt, as with a browser; none with an empty store
_START = 18.0  # seconds for a server's start and the pause, on a slow host


class Smoke:
    """One run. `result` is the content of the file."""

    def __init__(self, options: argparse.Namespace, setup: command.Setup, folder: Path, models: Path) -> None:
        self._options, self._setup, self._folder, self._models = options, setup, folder, models
        self.store = folder / "store"
        self._files: dict[str, str] = {}
        self._latents: dict[tuple[str, int], Any] = {}  # Resolute's, by row and steps
        self._told: list[Check] = []
        self._deadline = 0.0
        self._before = 0  # bytes of the device that were in use before the servers
        self.result: dict[str, Any] = {
            **commit_of(ROOT, options.commit), "comfyui_commit": commit_of(setup.comfyui, None)["commit"],
            "arguments": rig.without_paths(options.argument), "is_cpu": options.cpu, "pause": PAUSE, "bundle": {},
            "rows": [row.about() for row in rows(options.cpu)], "left": [], "failed": {},
        }  # fmt: skip

    def prepare(self) -> None:
        """Make the models, and import the bundle. This does not count in the run's time."""
        started = time.monotonic()
        self._files = make_models(self._setup, self._models, self._options.cpu)
        bundle = self._options.bundle
        if bundle is not None and bundle.is_file():
            self.result["bundle"] = import_bundle(bundle, self._server("import"), self.store)
        self._before = used_bytes()  # with this process's own context
        self.result["prepare_seconds"] = round(time.monotonic() - started, 1)

    def run(self) -> None:
        """Run all servers. Records a failed prompt or server in `result` and raises nothing for it."""
        self._deadline = time.monotonic() + self._options.seconds
        all_rows = rows(self._options.cpu)
        behind = [row for row in all_rows if row.kind in BEHIND]
        others = [row for row in all_rows if row.kind not in BEHIND]
        stock = [row for row in all_rows if row.kind != COLD]
        for name, contender, each in (("cold", OURS, behind), ("restart", OURS, others), ("stock", STOCK, stock)):
            try:
                self._serve(name, contender, each)
            except ServerError as error:  # it did not start
                self._fail(name, error)
            self.export()
            self.save()

    def _serve(self, name: str, contender: str, wanted: list[Row]) -> None:
        if self._left() < _START + _seconds(wanted[0], contender):
            self._skip([f"{name}: {row.name}" for row in wanted])
            return
        # Delete the kernels of earlier servers: a restart must load everything from the store.
        shutil.rmtree(self._folder / "inductor", ignore_errors=True)
        started = time.monotonic()
        with self._server(name, contender) as server:
            ready = round(time.monotonic() - started, 1)
            print(f"-- {name}: a server of {contender}, ready after {ready} s", flush=True)
            time.sleep(0.0 if name == "cold" else PAUSE)
            about = rig.environment(server)
            self.result |= about if "date" not in self.result else {}
            log_lines = [line for line in server.log().splitlines() if any(part in line for part in rig.LOG_LINES)]
            self.result.setdefault("servers", {})[name] = {"ready_seconds": ready, "told": log_lines}
            try:
                for row in wanted:
                    self._measure(server, row, contender, name)
                if name == "cold":
                    self.result["servers"][name] |= rig.until_compiled(
                        server.client, min(rig.COMPILE_TIMEOUT, self._left())
                    )
            finally:
                self.result["servers"][name] |= server.client.get("/resolute/events") if _answers(server) else {}

    def _server(self, name: str, contender: str = OURS) -> ComfyServer:
        """Stock's server has no store, or the pack would load regions during its prompts."""
        store = str(self.store) if contender == OURS else "0"
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"), "TRITON_CACHE_DIR": None}
        return rig.server(
            self._setup, self._folder / name, self._options.argument, models=self._models, cpu=self._options.cpu,
            environment={**caches, "RESOLUTE_STORE": store, "RESOLUTE_COMPILE": None},
        )  # fmt: skip

    # --- rows -------------------------------------------------------------------------------------------------------

    def _measure(self, server: ComfyServer, row: Row, contender: str, name: str) -> None:
        """Measure a row as far as the time allows, write it, and print its new checks."""
        if self._left() < _seconds(row, contender):
            self._skip([f"{name}: {row.name}"])
            return
        place = next(each for each in self.result["rows"] if each["row"] == row.name)
        entry: dict[str, Any] = {"prompts": []}
        place[contender] = entry
        try:
            if row.kind == UNLOAD:
                entry |= self._measure_unload(server)
            else:
                self._prompts(server, row, contender, place)
        except OutOfTimeError:
            self._skip([f"{name}: {row.name}"])
        except (PromptError, ServerError) as error:
            entry["failed"] = rig.first_line(error)
            self._fail(f"{name}: {row.name}", error)
        self.save()
        news = [each for each in row_checks(place, self.result) if each not in self._told]
        self._told += news
        print("".join(f"{line}\n" for line in table(news).splitlines()[1:]), end="", flush=True)

    def _prompts(self, server: ComfyServer, row: Row, contender: str, place: dict[str, Any]) -> None:
        done = place[contender]["prompts"]
        if row.kind == RESTART and contender == STOCK:  # reuse QUEUE's: a server has only one first prompt
            queue = next(each for each in self.result["rows"] if each["kind"] == QUEUE)
            done += queue.get(STOCK, {}).get("prompts", [])[:1]
        for number, count in [*enumerate(row.counts)][len(done) :]:
            left = self._left()
            if left < 1:
                raise OutOfTimeError
            seed = 1 + number + (100 if row.kind == QUEUE else 0)  # that no other row uses
            nodes = prompt(row.at(number), contender, count, seed, self._files, self._options.cpu)
            before, without_gain = rig.counters(server.client), server.log().count(rig.NO_GAIN)
            try:
                history = server.client.run(nodes, left)
            except ServerError as error:
                if self._left() < 1:
                    raise OutOfTimeError from error
                raise
            risen = rig.rise(before, rig.counters(server.client))
            told = {"without_gain": server.log().count(rig.NO_GAIN) - without_gain}
            done.append(
                {"count": count, "seed": seed, "seconds": execution_seconds(history), "counters": risen, **told}
            )
            if server.client.outputs(history, "latents"):
                name = f"prompt {1 + number}" if row.kind == QUEUE else str(count)
                self._compare(place, (row.name, number), name, contender, rig.latents(server.client, history))

    def _compare(self, place: dict[str, Any], key: tuple[str, int], name: str, contender: str, latents: Any) -> None:
        """Keep Resolute's latents of a prompt; for stock's, write the error between both into the row, under `name`."""
        if contender == OURS:
            self._latents[key] = latents
        elif key in self._latents:
            place.setdefault("errors", {})[name] = rig.error(self._latents[key], latents)

    def _measure_unload(self, server: ComfyServer) -> dict[str, Any]:
        """Unload all models, wait until the memory in use is stable, and return the memory that is still in use."""
        server.client.post("/free", {"unload_models": True})
        used, seconds = settled_bytes(STILL)
        given_back = {"after_unload_gib": round((used - self._before) / GIB, 3), "seconds": round(seconds, 1)}
        return given_back | {"processes_mib": processes_mib()}

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _skip(self, names: list[str]) -> None:
        self.result["left"] += names
        for name in names:
            print(f"{name}: left out, {max(self._left(), 0):.0f} s are left", flush=True)

    def _fail(self, name: str, error: Exception) -> None:
        self.result["failed"][name] = str(error)[:2000]
        print(f"{name}: {error}", flush=True)

    def save(self) -> None:
        if self._deadline:
            self.result["seconds"] = round(self._options.seconds - self._left(), 1)
        self.result["checks"] = [check._asdict() for check in checks_of(self.result)]
        rig.save(self._options.out, self.result)

    # --- the bundle -------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Write all regions of the store into the bundle."""
        file = self._options.bundle
        for name in bundles.environments(self.store) if file is not None else ():
            try:
                report = export_to(file, Place(None, self.store, name))
            except SetupError as error:  # nothing was compiled
                print(f"bundle: {error}", flush=True)
                continue
            about = {"regions": len(report.done), "bytes": file.stat().st_size, "refused": report.refused}
            self.result["bundle"]["exported"] = about
            print(f"bundle: {about['regions']} regions, {about['bytes'] / 2**20:.1f} MiB", flush=True)


def _seconds(row: Row, contender: str) -> int:
    return row.seconds[contender == STOCK]


def _answers(server: ComfyServer) -> bool:
    return server.process is not None and server.process.poll() is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="compiled regions, read and written")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; 25 GB")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where git does not know it")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the table of docs/measured.md from this result, run nothing"
    )
    add_options(parser, seconds=SECONDS, cpu="small models")
    options = parser.parse_args()
    if options.page:
        write_page(options.page)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
    if options.folder:
        return run(options, options.folder.resolve())
    with tempfile.TemporaryDirectory(prefix="resolute-smoke-") as folder:
        return run(options, Path(folder))


def run(options: argparse.Namespace, folder: Path) -> int:
    """One run in a folder; deletes all old content except the models. Returns the exit code."""
    for name in ("store", "inductor", "cold", "restart", "stock"):
        shutil.rmtree(folder / name, ignore_errors=True)
    models = (options.models or folder / "models").resolve()
    smoke = Smoke(options, command.prepare(), folder, models)
    smoke.prepare()
    try:
        smoke.run()
    finally:
        smoke.export()
        smoke.save()
        checks = checks_of(smoke.result)
        print(f"\n{table(checks)}\n\nsmoke: {summary(checks)}; {smoke.result.get('seconds', 0)} s", flush=True)
    return 0 if all(check.verdict == PASS for check in checks) else 1


if __name__ == "__main__":
    sys.exit(as_command(main))
