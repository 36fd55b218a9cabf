"""Measures the rows of `benchmarks.run`."""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from scripts.errors import PromptError, ServerError
from scripts.server.client import execution_seconds
from scripts.server.process import ComfyServer

from . import rig, workloads
from .card_memory import GIB, small_card
from .cells import PARTS, Cells, OutOfTimeError, Row
from .family_models import family, floor_ms, path_of
from .rig import OURS, STOCK, Size
from .run_table import line
from .servers import Servers, given_back
from .weight_formats import FORMATS, file_of
from .workloads import CONTENDERS, REFERENCE

FLOOR_TFLOPS = 790  # what an H200 reaches in large products of bf16
LORA_STRENGTHS = (1.0, 0.5, 0.5, None)  # of one prompt each; None: without it
_MOST_PROMPTS = 8  # until Resolute knows which way it decodes faster


class Runner:
    """Measures what the rows of a model lack."""

    def __init__(self, servers: Servers, cells: Cells, options: argparse.Namespace) -> None:
        self._servers, self._cells, self._options = servers, cells, options
        self.files: dict[str, str] = {}  # of checkpoints

    def lacks(self, name: str, free: float | None) -> bool:
        """A contender is missing in a row of the model."""
        return any(row[PARTS] for row in self._rows(name, free))

    def rows(self, name: str, free: float | None) -> Iterator[Row]:
        """The rows of a model on a card, each time that a contender was measured at one more size."""
        wanted = self._rows(name, free)
        for row, size in zip(wanted, self._sizes(name), strict=True):
            row["floor_ms"] = self._floor(name, size)
        is_own = free is not None or self._options.restart
        for contender in self._options.contenders:
            mine = [(row, size) for row, size in zip(wanted, self._sizes(name), strict=True) if contender in row[PARTS]]
            if not mine:
                continue
            if is_own:
                self._compile(name, contender, free)
            with small_card(free):
                try:
                    yield from self._visit(name, contender, free, is_own, mine)
                except ServerError:
                    self._servers.close()  # it may have ended; others get a new one
                    raise
                finally:
                    if is_own:
                        self._servers.close()

    def _visit(
        self, name: str, contender: str, free: float | None, is_own: bool, mine: list[tuple[Row, Size]]
    ) -> Iterator[Row]:
        server, memory, before = self._servers.get(contender, free, is_own)
        self._cells.about |= rig.environment(server)
        for row, size in mine:
            memory.take()
            try:
                if not is_own and row is mine[0][0]:  # load what the model before drove out
                    self._prompts(server, name, STOCK, size, [1], 80)
                row[contender] = self._measure(server, name, contender, size, row)
                if row is mine[0][0] and self._has_lora(name) and contender in (OURS, STOCK):
                    row[contender]["lora"] = self._with_lora(server, name, contender, size)
            except PromptError as error:  # core's node fails with some models; the others are still measured
                row[contender] = {"failed": rig.first_line(error)}
                self._cells.failed[f"{_name(row)} {contender}"] = rig.first_line(error)
            taken = memory.take()
            row[contender] |= {"peak_gib": round(taken["device_gib"] - before / GIB, 3), "host_gib": taken["host_gib"]}
            if is_own and row is mine[-1][0]:
                row[contender] |= given_back(server, before)
            self._errors(row)
            row[PARTS] = _missing(row, self._options.contenders)
            print(line(row, contender), flush=True)
            yield row
        self._cells.save(**server.client.get("/resolute/events"), attention=_cache(server)["attention"])

    def _rows(self, name: str, free: float | None) -> list[Row]:
        """Those of an earlier run, or new ones."""
        rows = []
        for width, height, batch, text in self._sizes(name):
            row: Row = {"model": name, "size": f"{width}x{height}", "batch": batch, "words": len(text.split())}
            row = self._cells.find(key_of(row | {"free_gib": free})) or row | {"free_gib": free}
            row[PARTS] = _missing(row, self._options.contenders)
            rows.append(row)
        return rows

    def _sizes(self, name: str) -> list[Size]:
        return workloads.sizes_of(name, self._options.cpu)[: self._options.sizes]

    def _floor(self, name: str, size: Size) -> float | None:
        if not workloads.is_transformer(name):
            return None
        form = name.partition(":")[2]
        return floor_ms(
            path_of(self._options.models, name), size[:2], FLOOR_TFLOPS, FORMATS[form].tera if form else None
        )

    def _compile(self, name: str, contender: str, free: float | None) -> None:
        """Compile what a model needs in a server before, and note what that took. Stock only begins for a restart."""
        caches, options = self._servers.caches(contender), self._options
        mark = caches / f"{name.replace(':', '-')}-{contender}"
        if not options.restart and (mark.exists() or not CONTENDERS[contender].backend):
            return
        if options.restart:
            shutil.rmtree(caches, ignore_errors=True)
        size, counts = self._sizes(name)[0], [steps_of(name, options)] * 2 if options.restart else [1]
        try:
            with small_card(free):
                server, _, _ = self._servers.get(contender, free, True)
                found = self._prompts(server, name, contender, size, counts, 90)[0]
        except PromptError as error:
            print(f"{name} {contender}: compiling failed: {error}", flush=True)
            return
        finally:
            self._servers.close()
        self._cells.about["cold"][f"{name} {contender}"] = {"free_gib": free, "seconds": found}
        print(f"{name} {contender}: {', then '.join(f'{each:.1f}' for each in found)} s to compile", flush=True)
        if options.restart and CONTENDERS[contender].backend:  # the store has to be enough; core has inductor's cache
            shutil.rmtree(caches / "torchinductor_cache_dir", ignore_errors=True)
        caches.mkdir(parents=True, exist_ok=True)
        mark.touch()

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prompt(self, server: ComfyServer, nodes: dict[str, Any]) -> tuple[float, Any]:
        """The seconds of a prompt, and its history. Raises OutOfTimeError."""
        left = self._cells.seconds_left
        if left < 1:
            raise OutOfTimeError
        try:
            history = server.client.run(nodes, left)
        except ServerError as error:
            if self._cells.seconds_left < 1:
                raise OutOfTimeError from error
            raise
        return execution_seconds(history), history

    def _prompts(
        self, server: ComfyServer, name: str, contender: str, size: Size, counts: list[int], seed: int
    ) -> tuple[list[float], Any]:
        """The seconds of a prompt of each number of steps, with seeds from this on, and the latents of the first."""
        runs = []
        for number, count in enumerate(counts):
            given = (name, contender, size, count, seed + number, self.files, self._options.cpu)
            runs.append(self._prompt(server, workloads.prompt(*given)))
        return [seconds for seconds, _ in runs], rig.latents(server.client, runs[0][1])

    def _measure(self, server: ComfyServer, name: str, contender: str, size: Size, row: Row) -> Row:
        """Whole prompts, then two of one step where a prompt has steps of one kind."""
        count = steps_of(name, self._options)
        repeats = 0 if contender == REFERENCE else self._options.repeats
        before = rig.counters(server.client)
        seconds, latents = self._prompts(server, name, contender, size, [count], 1)
        while len(seconds) < _MOST_PROMPTS and CONTENDERS[contender].backend and not _is_settled(server):
            seconds += self._prompts(server, name, contender, size, [count], 1 + len(seconds))[0]
        if repeats:
            seconds += self._prompts(server, name, contender, size, [count] * repeats, 30)[0]
        steady = statistics.median(seconds[-repeats:])
        found: Row = {"seconds": seconds, "first_s": seconds[0], "wait_s": seconds[0] - steady, "steady_s": steady}
        self._keep(row, contender, "whole", latents)
        if name not in workloads.WHOLES:
            short, latents = self._prompts(server, name, contender, size, [1] * max(repeats, 1), 50)
            found |= {"one_step_seconds": short, "ms": 1000 * (steady - min(short)) / (count - 1)}
            self._keep(row, contender, "one-step", latents)
        risen = rig.rise(before, rig.counters(server.client))
        found |= {"bypasses": risen.pop("bypasses"), "counters": risen, "capture_mib": _cache(server)["bytes"] >> 20}
        if contender == OURS:
            modules = _cache(server)["modules"]
            found["formats"] = sorted({text for module in modules for text in module["formats"]})
            found["whole_calls"] = _cache(server)["whole_calls"]
        return found

    def _has_lora(self, name: str) -> bool:
        return bool(self._options.lora and workloads.is_transformer(name))

    def _with_lora(self, server: ComfyServer, name: str, contender: str, size: Size) -> Row:
        """The seconds and counters of four prompts of four steps: a LoRA, another strength, the same again, none."""
        before, seconds = rig.counters(server.client), []
        plain, _, form = name.partition(":")
        for number, strength in enumerate(LORA_STRENGTHS):
            nodes = workloads.transformer(plain, family(plain, self._options.cpu), size, 4, 60 + number, form)
            nodes = nodes if strength is None else rig.with_lora(nodes, file_of(plain), strength)
            seconds.append(self._prompt(server, workloads.as_contender(nodes, contender))[0])
        return {"seconds": seconds, **rig.rise(before, rig.counters(server.client))}

    # --- errors -----------------------------------------------------------------------------------------------------

    def _latents(self, row: Row, contender: str, what: str) -> Path:
        folder: Path = self._options.folder / "latents"
        return folder / f"{'-'.join(map(str, key_of(row)))}-{contender}-{what}.npy".replace(":", "-")

    def _keep(self, row: Row, contender: str, what: str, latents: Any) -> None:
        file = self._latents(row, contender, what)
        file.parent.mkdir(parents=True, exist_ok=True)
        numpy.save(file, latents)

    def _errors(self, row: Row) -> None:
        """How far each contender is from the reference, or from stock where there is none."""
        base = REFERENCE if REFERENCE in self._options.contenders else STOCK
        for what, figure in (("whole", "error"), ("one-step", "error_one_step")):
            exact = self._latents(row, base, what)
            for contender in CONTENDERS:
                own = self._latents(row, contender, what)
                if contender != base and contender in row and own.is_file() and exact.is_file():
                    row[contender][figure] = rig.error(numpy.load(own), numpy.load(exact))


def steps_of(name: str, options: argparse.Namespace) -> int:
    return workloads.steps_of(name, options.cpu)


def _cache(server: ComfyServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/resolute/cache")
    return found


def _is_settled(server: ComfyServer) -> bool:
    """It is known which way each decode is faster."""
    return all(each["is_settled"] for each in _cache(server)["whole_calls"] if each["role"].startswith("vae"))


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "size", "batch", "words", "free_gib"))


def _name(row: Row) -> str:
    return f"{row['model']} {row['size']} batch {row['batch']}"


def _missing(row: Row, contenders: list[str]) -> list[str]:
    return [each for each in contenders if "failed" in row.get(each, {"failed": "it was not tried"})]
