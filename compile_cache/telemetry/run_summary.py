"""One sampling run or one decode: its counts, waits and timeline. `rows` puts it into words.

Plain data: no torch, no ComfyUI.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..texts import Text
from .stats import SHORT_WAIT, Event

_SLIVER = 0.02  # share of a run; a shorter gap between two pieces of work is not shown
_MAX_SEGMENTS = 60
NOW_COMPILED = Text("Now compiled")  # once a call ran all regions, after calls that ran originals in place of them
# Kinds of waits that the result of a run may mention, and the counter that must have risen for that.
SAID = {"compile": "region_compiles", "load": "region_loads", "capture": "captures"}
_SIZE = re.compile(r"(\d+)x(\d+)(?:,|$)")


@dataclass(frozen=True, slots=True)
class Run:
    """One sampling run, one decode, or the calls of a ControlNet in one run.

    model: the name of its architecture. width, height: of the requested image, in pixels. batch: the user's images,
    without the negative prompt's half. steps: 0 if it has none. started: Unix seconds. seconds: the whole run;
    waited: of these, compiling, loading and capturing; waits: the same seconds as single events. beside: the waits of
    ControlNets during the run, which are reported as separate runs. counts: the increase of each counter. events:
    during the run. stopped: the user cancelled it. why_no_calls: a sentence if no call reached the compiled model.
    cell: pixels per side of a latent cell.
    structure: the first digits of the digest of the model's structure, as `model` of a shape in `GET /resolute/cache`.
    formats: the kernels that compute its quantized weights: "int8_tensorwise products".
    file: the model's file, if known. step_bytes: bytes of the weights that a step needs, and of all weights, if the
    model was too large for the device and a step needs fewer. is_warm_up: nobody waits for its picture.
    came: blocks that earlier calls ran as originals were compiled in the background, and later calls ran them compiled.
    times: seconds of a compiled call and of an original one, if both were timed. on_cpu: on a CPU, without speed-up.
    why_eager: if its backend compiles nothing, that backend and why: "eager (not inductor: there is no C++ compiler)".
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
    waits: tuple[Event, ...] = ()
    beside: tuple[Event, ...] = ()
    stopped: bool = False
    step_bytes: tuple[int, int] = (0, 0)
    is_warm_up: bool = False
    why_eager: str = ""
    came: bool = False
    times: tuple[float, float] | None = None
    on_cpu: bool = False

    @property
    def size(self) -> str:
        return size_text(self.width, self.height, self.batch)

    @property
    def is_plain(self) -> bool:
        """True if the run ended and never waited, so its seconds are those of later prompts."""
        worked = any(self.counts.get(name, 0) for name in SAID.values()) or self._beside >= SHORT_WAIT
        return not (self.stopped or self.why_no_calls or worked)

    @property
    def ran_originals(self) -> bool:
        """True if some calls ran originals, replayed or not, in place of code that was being compiled."""
        return bool(self.counts.get("waiting_calls", 0) or self.counts.get("original_replays", 0))

    @property
    def seconds_without_waits(self) -> float:
        return max(self.seconds - self.waited - self._beside, 0.0)

    @property
    def _beside(self) -> float:
        return sum(wait.seconds for wait in self.beside)

    def seconds_of(self, kind: str) -> float:
        """Return the seconds that the prompt waited for this kind of work; parallel compiles count once.

        The reported kinds add up to `waited`: the first one includes unreported waits, such as loading the backend.
        """
        said = [name for name, counter in SAID.items() if self.counts.get(counter, 0)]
        others = said[1:] if said[:1] == [kind] else [each for each in SAID if each != kind]
        return max(self.waited - sum(wait.seconds for wait in self.waits if wait.kind in others), 0.0)

    @property
    def answered_by(self) -> str:
        """The path that answered most calls: "replay", "regions" or "bypass"; "originals" if all calls waited for code,
        and "stopped" if none was answered.
        """
        waiting = self.counts.get("waiting_calls", 0)
        counts = {
            "regions": self.counts.get("graph_calls", 0),
            "replay": self.counts.get("replays", 0),
            "bypass": self.counts.get("eager_calls", 0) - waiting + (1 if self.why_no_calls else 0),
        }
        if not any(counts.values()):
            return "originals" if waiting else "stopped"
        return max(counts, key=lambda kind: counts[kind])

    def segments(self) -> list[dict[str, Any]]:
        """Return the timeline as segments (kind, start, seconds); time in the model has the kind `answered_by`."""
        sliver = max(SHORT_WAIT, _SLIVER * self.seconds)
        stretches = [self._span(event) for event in self.events if event.kind == "originals"]
        # A short trace between two calls that wait for code is part of their stretch.
        waits = [
            (since, until, kind)
            for since, until, kind in sorted(map(self._span, (*self.waits, *self.beside)))
            if until - since >= sliver or not any(begun <= since and until <= over for begun, over, _ in stretches)
        ]
        spans, merged, at = [*waits, *stretches], list[dict[str, Any]](), 0.0
        for start, end in pairwise(sorted({0.0, self.seconds, *(edge for span in spans for edge in span[:2])})):
            middle = (start + end) / 2
            kind = next((kind for since, until, kind in spans if since <= middle <= until), self.answered_by)
            if kind not in SAID and end - start <= sliver and end < self.seconds:
                continue
            begun = start if kind in SAID else at  # waits without the sliver before them, so that the kinds add up
            if merged and merged[-1]["kind"] == kind:
                merged[-1]["seconds"] += end - begun
            else:
                merged.append({"kind": kind, "start": begun, "seconds": end - begun})
            at = end
        compiles = self.counts.get("region_compiles", 0) or not self.counts.get("verifications", 0)
        if self.came or self.ran_originals or not compiles:  # it compiled nothing, only compared
            merged = [{**each, "kind": "check"} if each["kind"] == "compile" else each for each in merged]
        return merged[:_MAX_SEGMENTS]

    def _span(self, event: Event) -> tuple[float, float, str]:
        """Return an event's start and end, in seconds from the start of the run, and its kind."""
        end = min(max(event.at - self.started, 0.0), self.seconds)
        return max(end - event.seconds, 0.0), end, event.kind


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the changes of several periods, each as `Stats.since` returns it."""
    names = parts[0]["counts"] if parts else ()
    return {
        "counts": {name: sum(part["counts"][name] for part in parts) for name in names},
        "waited": sum(part["waited"] for part in parts),
        "bypasses": dict(sum((Counter(part["bypasses"]) for part in parts), Counter[str]())),
        "events": tuple(event for part in parts for event in part["events"]),
        "waits": tuple(wait for part in parts for wait in part["waits"]),
    }


def subtract(changes: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sampling run's changes without those of its ControlNets, whose waits become `beside`."""
    return {
        "counts": {name: value - others["counts"].get(name, 0) for name, value in changes["counts"].items()},
        "waited": max(changes["waited"] - others["waited"], 0.0),
        "bypasses": dict(Counter(changes["bypasses"]) - Counter(others["bypasses"])),
        # Events of kind originals stay: the timeline shows both models' events, without a gap at each step.
        "events": tuple(
            event for event in changes["events"] if event not in others["events"] or event.kind == "originals"
        ),
        "waits": tuple(wait for wait in changes["waits"] if wait not in others["waits"]),
        "beside": others["waits"],
    }


def size_text(width: int, height: int, batch: int) -> str:
    """Return a size for users: "384x256, batch 2". In pixels; batch: the user's images."""
    size = f"{width}x{height}"
    return Text("{size}, batch {batch}", size=size, batch=batch) if batch > 1 else size


def sides_in(text: str) -> tuple[int, int] | None:
    """Return (width, height), in pixels, of a `size_text`; None for another text."""
    match = _SIZE.match(text)
    return None if match is None else (int(match[1]), int(match[2]))


def time_text(seconds: float) -> str:
    """Return a duration for users: "96 ms", "0.24 s", "83.3 s"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    return f"{seconds:.1f} s"
