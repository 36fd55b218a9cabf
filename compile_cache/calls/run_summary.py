"""One sampling run or one decode in words: its result in a line, its reasons in sentences, its timeline.

Plain data: no torch, no ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..keys import Role
from ..stats import SHORT_WAIT, Event, Wait
from ..texts import Text, words_of
from .misses import SINCE
from .reasons import because, in_short

_SLIVER = 0.02  # of a run; a shorter gap between two pieces of work is not shown
_MAX_SEGMENTS = 60
_MAX_REASONS = 4
# Kinds of waits that the result of a run may say, and the counter that has to rise for that.
_SAID = {"compile": "region_compiles", "load": "region_loads", "capture": "captures"}
_NOTHING_KEPT = Text("no compiled code for these blocks was kept on this machine yet")
_BACKEND = "the backend"  # text of the event of loading it
_SIZE = re.compile(r"(\d+)x(\d+)(?:,|$)")


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
    if the model was too large for the device and a step needs fewer. is_warm_up: nobody waits for its picture.
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
    waits: tuple[Wait, ...] = ()
    stopped: bool = False
    regions: tuple[int, int] = (0, 0)
    step_bytes: tuple[int, int] = (0, 0)
    is_warm_up: bool = False
    why_eager: str = ""

    @property
    def size(self) -> str:
        return size_text(self.width, self.height, self.batch)

    @property
    def is_plain(self) -> bool:
        """It ran to its end and had nothing to wait for, so its seconds are what a prompt takes from now on."""
        return not (self.stopped or self.why_no_calls or any(self.counts.get(name, 0) for name in _SAID.values()))

    def status(self) -> Text:
        """The result in up to three lines, as the node shows it: "384x256, batch 2: nothing compiled, 21 ms/step"."""
        first, *more = self.lines()
        if not self.why_no_calls:
            first = Text("{size}: {result}", size=self.size, result=first)
        return Text.joined("\n", [first, *more])

    def lines(self) -> list[str]:
        """The lines of `status` without the size."""
        if self.why_no_calls:
            return [Text("not compiled: {why}", why=self.why_no_calls)]
        lines: list[str] = [Text.joined(", ", self._results())]
        lines += [", ".join(text.partition(":")[0] for text in self.formats)] if self.formats else []
        if self.why_eager:
            return [*lines, Text("backend: {why}", why=self.why_eager)]
        return lines + [self._streams() or in_short(code) for code in self.bypasses][:1]

    def _streams(self) -> str:
        """How much of a model that is too large a step needs; empty if that is all of it."""
        needed, every = (f"{each / 1e9:.2g}" for each in self.step_bytes)
        return Text("needs {needed} of {every} GB per step", needed=needed, every=every) if needed != every else ""

    def _results(self) -> list[str]:
        compiles, loads = self.counts.get("region_compiles", 0), self.counts.get("region_loads", 0)
        done = []
        if compiles:
            done.append(Text("compiled {count} regions in {time}", count=compiles, time=self._time("compile")))
        if loads:
            done.append(Text("loaded {count} regions in {time}", count=loads, time=self._time("load")))
        if self.counts.get("captures", 0):
            done.append(Text("new size captured in {time}", time=self._time("capture")))
        answered = self.counts.get("replays", 0) + self.counts.get("graph_calls", 0)
        if not answered and not self.counts.get("eager_calls", 0):  # cancelled, or failed
            return [*done, self._stop(Text("stopped in the first step"))]
        if self.stopped:
            return [*done, self._stop(Text("stopped"))]
        return [*(done or [Text("nothing compiled") if answered else Text("ran uncompiled")]), *self._speed()]

    def _stop(self, text: Text) -> Text:
        ready, total = self.regions
        return Text("stopped; {done} of {total} are kept", done=ready, total=total) if ready < total else text

    def _speed(self) -> list[str]:
        seconds = max(self.seconds - self.waited, 0.0)
        if self.role == Role.CONTROLNET.value or not seconds:
            return []
        return [Text("{time}/step", time=time_text(seconds / self.steps))] if self.steps else [time_text(seconds)]

    def _time(self, kind: str) -> str:
        return time_text(self._seconds(kind))

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
            if start - at > max(SHORT_WAIT, _SLIVER * self.seconds):
                merged.append({"kind": self.answered_by, "start": at, "seconds": start - at})
            if merged and merged[-1]["kind"] == kind:
                merged[-1]["seconds"] += end - start  # without the sliver before it, so that the kinds add up
            else:
                merged.append({"kind": kind, "start": start, "seconds": end - start})
            at = end
        if self.seconds > at:
            merged.append({"kind": self.answered_by, "start": at, "seconds": self.seconds - at})
        return merged[:_MAX_SEGMENTS]

    def marks(self) -> list[Text]:
        """Labels that set this run apart, for its line in the panel."""
        marks = [Text("warm-up")] if self.is_warm_up else []
        marks += [Text("cancelled")] if self.stopped else []
        return marks + [Text("loading the backend, {time}", time=time_text(each)) for each in self._backend_seconds()]

    def _backend_seconds(self) -> list[float]:
        return [event.seconds for event in self.events if event.kind == "load" and event.text == _BACKEND]

    def reasons(self) -> list[Text]:
        """Why the run waited, and why calls were bypassed: one sentence each."""
        found = [*self._why_compiled(), *self._why_loaded()]
        if measured := [event.seconds for event in self.events if event.kind == "measure"]:
            found.append(
                Text(
                    "chose {count} attention kernels in {time}: the first use of a shape since ComfyUI started.",
                    count=len(measured),
                    time=time_text(sum(measured)),
                )
            )
        for event in self.events:
            if event.kind == "capture":
                why = because(event.text.partition(": ")[2], self.cell)
                found.append(Text("captured in {time}: {why}.", time=time_text(event.seconds), why=why))
        found += [
            Text("{why} ({count} times).", why=in_short(code), count=count)
            if count > 1
            else Text("{why} (once).", why=in_short(code))
            for code, count in self.bypasses.items()
        ]
        if self.why_no_calls:
            found.append(Text("{why}.", why=self.why_no_calls))
        kept = list(dict.fromkeys(text.as_sentence() for text in found))
        more = [Text("And {count} more.", count=len(kept) - _MAX_REASONS)] if len(kept) > _MAX_REASONS else []
        return [*kept[:_MAX_REASONS], *more]

    def _why_compiled(self) -> list[Text]:
        if not (compiles := self.counts.get("region_compiles", 0)):
            return self._why_compared()
        why = _NOTHING_KEPT
        if changed := [event.text.partition(SINCE)[2] for event in self.events if SINCE in event.text]:
            why = Text("torch's settings changed since this model last ran: {changes}", changes=changed[0])
        time = self._time("compile")
        return [Text("compiled {count} regions in {time}: {why}.", count=compiles, time=time, why=why)]

    def _why_compared(self) -> list[Text]:
        """Code is compared with the original before its first use at sizes for which its guards prove nothing."""
        compared, seconds = self.counts.get("verifications", 0), self._seconds("compile")
        if not compared or seconds < SHORT_WAIT:
            return []
        text = "compared {count} regions with the original in {time}: no size like this one was used before."
        return [Text(text, count=compared, time=time_text(seconds))]

    def _why_loaded(self) -> list[Text]:
        found = []
        if loads := self.counts.get("region_loads", 0):
            text = "loaded {count} regions in {time}: the first use since ComfyUI started."
            found.append(Text(text, count=loads, time=self._time("load")))
        text = "loaded the backend in {time}: the first use since ComfyUI started."
        return found + [Text(text, time=time_text(seconds)) for seconds in self._backend_seconds()]

    def plain(self) -> dict[str, Any]:
        """For the panel and `GET /resolute/runs`. words: how a front end says the other texts in another language."""
        texts: dict[str, Sequence[str]] = {"lines": self.lines(), "reasons": self.reasons(), "marks": self.marks()}
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
            **texts,
            "words": {name: [words_of(text) for text in some] for name, some in texts.items()},
        }


def size_text(width: int, height: int, batch: int) -> str:
    """For people: "384x256, batch 2". In pixels; batch: the user's images."""
    size = f"{width}x{height}"
    return Text("{size}, batch {batch}", size=size, batch=batch) if batch > 1 else size


def sides_in(text: str) -> tuple[int, int] | None:
    """(width, height) in pixels of a `size_text`; None for another text."""
    found = _SIZE.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def time_text(seconds: float) -> str:
    """For people: "96 ms", "0.24 s", "83.3 s"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    return f"{seconds:.1f} s"
