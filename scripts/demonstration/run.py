"""Runs the demo's jobs on one server and reads the time and counters of each prompt."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..server.client import Client, History, execution_seconds
from .plan import SEED, Job, prompt_for

Counters = dict[str, Any]
Say = Callable[[str], None]
COUNTED = ("region_compiles", "compile_failures", "captures", "replays", "graph_calls", "eager_calls", "stall_seconds")


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One prompt: its seed, ComfyUI's execution time in seconds, and the increase of each counter."""

    seed: int
    seconds: float
    counters: Counters


@dataclass(slots=True)
class Row:
    """One job: its eager and compiled prompts, and the images of the first of each."""

    job: Job
    eager: list[PromptRun] = field(default_factory=list)
    compiled: list[PromptRun] = field(default_factory=list)
    eager_images: list[Path] = field(default_factory=list)
    compiled_images: list[Path] = field(default_factory=list)
    max_error: int | None = None

    def total(self, name: str) -> Any:
        """The increase of a counter over all compiled prompts."""
        return sum(run.counters[name] for run in self.compiled)


class DemoRunner:
    """Runs jobs eager and then compiled with the same seeds; writes the images to ``output``."""

    def __init__(self, client: Client, steps: int, output: Path, say: Say) -> None:
        self._client, self._steps, self._output, self._say = client, steps, output, say

    def run(self, jobs: tuple[Job, ...]) -> list[Row]:
        """Run every job twice eager, then every job twice compiled. Raises PromptError or ServerError."""
        rows = [Row(job) for job in jobs]
        for number, row in enumerate(rows, 1):
            runs, row.eager_images = self._pass(row.job, "eager")
            row.eager += runs
            self._say(f"  eager {number:2}/{len(rows)}  {row.job}: {_times(runs)}")
        for number, row in enumerate(rows, 1):
            runs, row.compiled_images = self._pass(row.job, "compiled")
            row.compiled += runs
            compiles = row.total("region_compiles")
            self._say(f"  compiled {number:2}/{len(rows)}  {row.job}: {_times(runs)}, {compiles} compiles")
        return rows

    def _pass(self, job: Job, label: str) -> tuple[list[PromptRun], list[Path]]:
        """Run two prompts; their seeds differ, because ComfyUI would answer a repeated prompt from its cache."""
        first, history = self._prompt(job, label, SEED)
        images = self._save(history, f"{job.name}_{label}")
        second, _ = self._prompt(job, label, SEED + 1)
        return [first, second], images

    def _prompt(self, job: Job, label: str, seed: int) -> tuple[PromptRun, History]:
        # The compiled pass keeps the workflow's own backend, `auto`.
        backend = "eager" if label == "eager" else None
        prompt = prompt_for(job, None, backend, seed, self._steps)
        before = self._counters()
        try:
            history = self._client.run(prompt)
        except PromptError as error:
            raise PromptError(f"{job} ({label}): {error}") from None
        return PromptRun(seed, execution_seconds(history), _rise(before, self._counters())), history

    def _counters(self) -> Counters:
        counters: Counters = self._client.get("/resolute/cache")["counters"]
        return counters

    def _save(self, history: History, name: str) -> list[Path]:
        """Write the images of SaveImage (not previews) and return the files, ordered by node."""
        shown = [image for image in self._client.outputs(history, "images") if image["type"] == "output"]
        paths = [self._output / f"{name}_{number}.png" for number in range(1, len(shown) + 1)]
        for path, image in zip(paths, shown, strict=True):
            path.write_bytes(self._client.raw("/view?" + urllib.parse.urlencode(image)))
        return paths


def bypass_reasons(client: Client) -> list[str]:
    """Every distinct bypass since the server started, as a sentence."""
    events = client.get("/resolute/events")["events"]
    return [event["text"] for event in events if event["kind"] == "bypass"]


def _rise(before: Counters, after: Counters) -> Counters:
    rise: Counters = {name: after[name] - before[name] for name in COUNTED}
    rise["stall_seconds"] = round(rise["stall_seconds"], 3)
    bypasses = {code: count - before["bypasses"].get(code, 0) for code, count in after["bypasses"].items()}
    rise["bypasses"] = {code: count for code, count in bypasses.items() if count}
    return rise


def _times(runs: list[PromptRun]) -> str:
    return " then ".join(f"{run.seconds:.1f} s" for run in runs)
