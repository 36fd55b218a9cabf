"""One sampling run or one decode in words: its result in a line, its reasons in sentences, its timeline.

Plain data: no torch, no ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..keys import Role
from ..stats import Event, Wait
from .misses import FIRST, FREED, SINCE

_SHORT = 0.05  # seconds; a shorter wait is not mentioned
_SLIVER = 0.02  # of a run; a shorter gap between two pieces of work is not shown
_MAX_SEGMENTS = 60
_MAX_REASONS = 4
# Kinds of waits that the result of a run may say, and the counter that has to rise for that.
_SAID = {"compile": "region_compiles", "load": "region_loads", "capture": "captures"}
# What a bypass means to a user, by code, where one line has to do; docs/troubleshooting.md has the rest.
_BYPASSES = {
    "observed_input": "Resolute does not know something in this call: no capture, or some blocks run as they are",
    "patched_block": "another node changes attention: some blocks run as they are",
    "replaced_forward": "another pack replaced code of this model: what uses that code runs as it is",
    "foreign_model": "another pack wrote a part of this model: no capture, and its blocks run as they are",
    "unreadable_weights": "weights of a class that Resolute does not know: their blocks run as they are",
    "streamed_weights": "weights are not all on the GPU: no capture",
    "no_regions": "this model has no blocks that Resolute knows",
    "compile_failed": "some blocks could not be compiled",
    "capture_failed": "CUDA refused the capture",
    "out_of_memory": "memory ran out: no capture",
    "over_budget": "a capture would take more memory than captures may",
    "core_compiler": "ComfyUI's own compiler was at work",
    "gradient": "gradients are on (training)",
    "left_out": "the blocks that you left out run as they are",
}
_NOTHING_KEPT = "no compiled code for these blocks was kept on this machine yet"
_SIZE = re.compile(r"(\d+)x(\d+)(?:,|$)")
_DIFFERENCE = re.compile(r"(\S+) (batch|channels|height|width|tokens) (\d+) -> (\d+)")


@dataclass(frozen=True, slots=True)
class Run:
    """One sampling run, one decode, or the calls of a ControlNet in one run.

    model: the name of its architecture. width, height: in pixels, of what the user asked for. batch: the user's images,
    without the negative prompt's half. steps: 0 where there are none. started: Unix seconds. seconds: the whole run;
    waited: of these, compiling, loading and capturing; waits: the same seconds one by one. counts: how far the counters
    rose. events: of this time. stopped: the user cancelled it. regions: how many of the prompt's regions are compiled.
    why_no_calls: a sentence if nothing reached the compiled model. cell: pixels to a side of one latent cell.
    structure: of the model, the first digits of its digest, as `model` of each shape in `GET /resolute/cache`.
    formats: what computes its quantized weights: "int8_tensorwise products".
    file: from which the model was loaded, if that is known. step_bytes: of the weights that a step needs, and of all,
    if the model was too large for the device and a step needs fewer.
    """

    model: str
    role: str
    width: int
    height: int
    batch: int
    steps: int
    started: float
    seconds: float
    waited: float
    counts: Mapping[str, int]
    cell: int
    bypasses: Mapping[str, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    why_no_calls: str = ""
    structure: str = ""
    formats: tuple[str, ...] = ()
    file: str = ""
    waits: tuple[Wait, ...] = ()
    stopped: bool = False
    regions: tuple[int, int] = (0, 0)
    step_bytes: tuple[int, int] = (0, 0)

    @property
    def size(self) -> str:
        return size_text(self.width, self.height, self.batch)

    @property
    def is_plain(self) -> bool:
        """It ran to its end and had nothing to wait for, so its seconds are what a prompt takes from now on."""
        return not (self.stopped or self.why_no_calls or any(self.counts.get(name, 0) for name in _SAID.values()))

    def status(self) -> str:
        """The result in up to three lines, as the node shows it: "384x256, batch 2: nothing compiled, 21 ms/step"."""
        if self.why_no_calls:
            return f"not compiled: {self.why_no_calls}"
        lines = [f"{self.size}: {', '.join(self._results())}"]
        lines += [", ".join(text.partition(":")[0] for text in self.formats)] if self.formats else []
        lines += [self._streams() or _BYPASSES.get(code, code) for code in self.bypasses][:1]
        return "\n".join(lines)

    def _streams(self) -> str:
        """How much of a model that is too large a step needs; empty if that is all of it."""
        needed, every = (f"{each / 1e9:.2g}" for each in self.step_bytes)
        return f"needs {needed} of {every} GB per step" if needed != every else ""

    def _results(self) -> list[str]:
        made = [
            _counted(self.counts.get("region_compiles", 0), "compiled", "region", self._seconds("compile")),
            _counted(self.counts.get("region_loads", 0), "loaded", "region", self._seconds("load")),
            f"new size captured in {time_text(self._seconds('capture'))}" if self.counts.get("captures", 0) else "",
        ]
        done = [text for text in made if text]
        answered = self.counts.get("replays", 0) + self.counts.get("graph_calls", 0)
        if not answered and not self.counts.get("eager_calls", 0):  # cancelled, or failed
            return [*done, self._stop("stopped in the first step")]
        if self.stopped:
            return [*done, self._stop("stopped")]
        return [*(done or ["nothing compiled" if answered else "ran uncompiled"]), *self._speed()]

    def _stop(self, text: str) -> str:
        ready, total = self.regions
        return f"stopped; {ready} of {total} are kept" if ready < total else text

    def _speed(self) -> list[str]:
        seconds = max(self.seconds - self.waited, 0.0)
        if self.role == Role.CONTROLNET.value or not seconds:
            return []
        return [f"{time_text(seconds / self.steps)}/step"] if self.steps else [time_text(seconds)]

    def _seconds(self, kind: str) -> float:
        """Seconds that the prompt waited for this kind of work; parallel compiles count once.

        The kinds that are said add up to `waited`: the first one also has what is not said, as loading the backend.
        """
        said = [name for name, counter in _SAID.items() if self.counts.get(counter, 0)]
        others = said[1:] if said[:1] == [kind] else [each for each in _SAID if each != kind]
        return max(self.waited - sum(wait.seconds for wait in self.waits if wait.kind in others), 0.0)

    def _spans(self) -> list[tuple[str, float, float]]:
        """(kind, seconds since the start, seconds) of each piece of work that the run waited for."""
        spans = []
        for wait in self.waits:
            end = min(wait.at - self.started, self.seconds)
            start = max(end - wait.seconds, 0.0)
            if end > start:
                spans.append((wait.kind, start, end - start))
        return spans

    @property
    def answered_by(self) -> str:
        """The path that answered most calls: "replay", "regions" or "bypass"."""
        counts = {
            "regions": self.counts.get("graph_calls", 0),
            "replay": self.counts.get("replays", 0),
            "bypass": self.counts.get("eager_calls", 0) + (1 if self.why_no_calls else 0),
        }
        return max(counts, key=lambda kind: counts[kind])

    def segments(self) -> list[dict[str, Any]]:
        """The run's time in pieces: kind, start and seconds; what is left over was spent in the model."""
        merged: list[dict[str, Any]] = []
        at = 0.0
        for kind, start, seconds in sorted(self._spans(), key=lambda span: span[1]):
            end = start + seconds
            if end <= at:
                continue
            start = max(start, at)
            if start - at > max(_SHORT, _SLIVER * self.seconds):
                merged.append({"kind": self.answered_by, "start": at, "seconds": start - at})
            if merged and merged[-1]["kind"] == kind:
                merged[-1]["seconds"] += end - start  # without the sliver before it, so that the kinds add up
            else:
                merged.append({"kind": kind, "start": start, "seconds": end - start})
            at = end
        if self.seconds > at:
            merged.append({"kind": self.answered_by, "start": at, "seconds": self.seconds - at})
        return merged[:_MAX_SEGMENTS]

    def reasons(self) -> list[str]:
        """Why the run waited, and why calls were bypassed: one sentence each."""
        found = []
        compiles, loads = self.counts.get("region_compiles", 0), self.counts.get("region_loads", 0)
        if compiles:
            changed = [event.text.partition(SINCE)[2] for event in self.events if SINCE in event.text]
            why = f"torch's settings changed since this model last ran: {changed[0]}" if changed else _NOTHING_KEPT
            found.append(f"{_counted(compiles, 'Compiled', 'region', self._seconds('compile'))}: {why}.")
        if loads:
            found.append(
                f"{_counted(loads, 'Loaded', 'region', self._seconds('load'))}: the first use since ComfyUI started."
            )
        if measured := [event.seconds for event in self.events if event.kind == "measure"]:
            found.append(
                f"{_counted(len(measured), 'Chose', 'attention kernel', sum(measured))}: the first use of a shape "
                "since ComfyUI started."
            )
        for event in self.events:
            if event.kind == "capture":
                found.append(
                    f"Captured in {time_text(event.seconds)}: {because(event.text.partition(': ')[2], self.cell)}."
                )
        found += [
            f"{_BYPASSES.get(code, code)} ({'once' if count == 1 else f'{count} times'})."
            for code, count in self.bypasses.items()
        ]
        if self.why_no_calls:
            found.append(f"{self.why_no_calls}.")
        kept = list(dict.fromkeys(text[:1].upper() + text[1:] for text in found))
        return [*kept[:_MAX_REASONS], *([f"And {len(kept) - _MAX_REASONS} more."] if len(kept) > _MAX_REASONS else [])]

    def plain(self) -> dict[str, Any]:
        """For the panel and `GET /resolute/runs`."""
        return {
            "model": self.model,
            "structure": self.structure,
            "file": self.file,
            "role": self.role,
            "size": self.size,
            "steps": self.steps,
            "started": self.started,
            "seconds": round(self.seconds, 4),
            "waited": round(self.waited, 4),
            "counts": dict(self.counts),
            "status": self.status(),
            "stopped": self.stopped,
            "segments": self.segments(),
            "reasons": self.reasons(),
        }


def size_text(width: int, height: int, batch: int) -> str:
    """For people: "384x256, batch 2". In pixels; batch: the user's images."""
    return f"{width}x{height}{f', batch {batch}' if batch > 1 else ''}"


def sides_in(text: str) -> tuple[int, int] | None:
    """(width, height) in pixels of a `size_text`; None for another text."""
    found = _SIZE.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def because(difference: str, cell: int) -> str:
    """The reason why a call was new, in a user's words. difference: from `misses`, as "latent height 15 -> 16".

    cell: pixels to a side of one latent cell.
    """
    if difference.startswith(FIRST):
        return difference.replace(FIRST, "the first run of this model since it was loaded", 1)
    if difference == FREED:
        return "its capture had been freed or evicted"
    if difference == "remembered":
        return "an earlier session used this size"
    if "weights moved or changed" in difference:
        return "the weights were moved or changed, by a LoRA or by ComfyUI's memory management"
    parts = [_in_words(part, cell) for part in difference.split(", ")]
    return " and ".join(dict.fromkeys(parts))


def _in_words(difference: str, cell: int) -> str:
    found = _DIFFERENCE.fullmatch(difference)
    if found is None:
        return difference
    tensor, dimension, old, new = found.groups()
    if tensor == "latent" and dimension in ("height", "width"):
        return f"the {dimension} changed from {int(old) * cell} to {int(new) * cell} pixels"
    if dimension == "batch":
        return f"the batch changed from {old} to {new}"
    if tensor == "context" and dimension == "tokens":
        return f"the prompt's length changed from {old} to {new} tokens"
    return difference


def _counted(number: int, verb: str, noun: str, seconds: float) -> str:
    if not number:
        return ""
    return f"{verb} {number} {noun}{'' if number == 1 else 's'} in {time_text(seconds)}"


def time_text(seconds: float) -> str:
    """For people: "96 ms", "0.24 s", "83.3 s"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    return f"{seconds:.1f} s"
