"""Results of *Measure against stock*: seconds with and without Resolute, by model, size and device.

The front end queues the prompts and measures the seconds of sampling and decode. The node Measure passes their pictures
to this module and writes no file. The pictures are compared when the front end sends the seconds.
"""

from __future__ import annotations

import datetime
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ....compile_cache.errors import UserError
from ....compile_cache.keys import VAE_ROLES
from ....compile_cache.telemetry.reasons import in_short
from ....compile_cache.telemetry.run_summary import Run, time_text
from ....compile_cache.texts import Text
from ....compile_cache.tuning.tuner import Tuner
from ..comfyui import messages
from ..process import runtime
from . import runs
from .image_comparison import LEVELS

ON, OFF = "on", "off"
# PSNR in whole dB, as shown. At or above _SAME, differences are hard to see. Pictures in half precision are between the
# two: compiled and stock differ there as much as stock does with another attention. Below _NEARLY, the computations
# themselves differed.
_SAME, _NEARLY = 40, 25

Key = tuple[str, str]  # the model's structure and the size


@dataclass(frozen=True, slots=True)
class Measurement:
    """structure: of the model, as in `GET /resolute/runs`. size: pixels and batch, for people. device: its name.
    seconds, stock_seconds: of sampling and decode, medians over `prompts` prompts of each. spread: seconds between the
    quartiles of the arm that varied more; 0 if one prompt of each was measured. mse: the mean squared error of the
    pictures, of the worst one of a batch, in levels of 255; None if there was no picture. file: of the model. date:
    "2026-11-27". bypass: the code of the run's first bypass, or empty. Raises ValueError for a time of 0.
    """

    model: str
    structure: str
    size: str
    device: str
    steps: int
    seconds: float
    stock_seconds: float
    mse: float | None
    spread: float = 0.0
    prompts: int = 1
    file: str = ""
    date: str = ""
    bypass: str = ""

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("a prompt takes time")

    @property
    def ratio(self) -> float:
        """Stock's seconds over ours; 1 if the spread hides the difference, or if it is below 5 percent."""
        ratio = self.stock_seconds / self.seconds
        is_clear = abs(self.stock_seconds - self.seconds) > self.spread and f"{ratio:.1f}" != "1.0"
        return ratio if is_clear else 1.0

    def result(self) -> Text:
        """As the node shows it after the size: "1.1 s, 2.9x stock (3.2 s), same picture (PSNR 52 dB)"."""
        text = self._seconds()
        if self.mse is None:
            return text
        return Text.joined(", ", [text, self._picture(self.mse)])

    def _picture(self, mse: float) -> Text:
        if not mse:
            return Text("identical picture")
        decibels = round(10 * math.log10(LEVELS**2 / mse))
        text = "another picture (PSNR {decibels} dB)"
        if decibels >= _SAME:
            text = "same picture (PSNR {decibels} dB)"
        elif decibels >= _NEARLY:
            text = "nearly the same picture (PSNR {decibels} dB)"
        return Text(text, decibels=decibels)

    def _seconds(self) -> Text:
        values = {"seconds": time_text(self.seconds), "stock": time_text(self.stock_seconds)}
        if self.ratio > 1.0:
            return Text("{seconds}, {ratio}x stock ({stock})", ratio=f"{self.ratio:.1f}", **values)
        if self.ratio < 1.0:
            return Text(
                "stock {stock}, Resolute {seconds}: slower here, because {why}", why=self._why_slower(), **values
            )
        return Text("{seconds}, no clear difference from stock ({stock})", **values)

    def _why_slower(self) -> str:
        if self.device == "cpu":
            return Text("a CPU gains nothing")
        return in_short(self.bypass) if self.bypass else Text("this model gains nothing on this GPU")

    def on_node(self) -> Text:
        """The seconds, shown after a prompt that was not measured: "1.1 s, 2.9x stock (3.2 s), measured on ..."."""
        return Text("{figure}, measured on {date}", figure=self._seconds(), date=self.date)

    def plain(self) -> dict[str, Any]:
        """As JSON, with a `text` for people and its `words`."""
        return {**asdict(self), "text": self.text(), "words": self.text().words}

    def text(self) -> Text:
        return Text("{size}: {result}", size=self.size, result=self.result())


# By measure and arm: (height, width, channels) in levels, of each picture or frame of that arm's latest prompt.
_pictures: dict[tuple[str, str], list[torch.Tensor]] = {}


def keep_picture(measure: str, arm: str, images: Any) -> None:
    """Keep the pictures of a measurement's prompt, (batch, height, width, channels), and drop other measurements'.

    measure: its number. arm: ON or OFF. images: anything but a tensor of 4 dimensions counts as no pictures.
    """
    for other in [key for key in _pictures if key[0] != measure]:
        del _pictures[other]
    is_picture = isinstance(images, torch.Tensor) and images.ndim == 4
    _pictures[measure, arm] = [_in_levels(each) for each in images] if is_picture else []


def _in_levels(image: torch.Tensor) -> torch.Tensor:
    """Convert to 8-bit levels, as in a saved file. NaN becomes black."""
    return (image.nan_to_num(0.0).clamp(0, 1) * LEVELS).round().to("cpu", torch.uint8)


def finish(body: Mapping[str, Any]) -> Measurement | None:
    """Compare the pictures of a measurement, drop them, and keep the result. Returns None if it was cancelled.

    body: `measure`, and, unless it was cancelled, `prompt_id`, `seconds` and `stock_seconds`; the last two are lists
    with the seconds of each prompt. `nodes` (ids) of the `workflow` (an id) show the result, also after a reload.
    Raises UserError for seconds that are no such list, and if nothing ran compiled in the prompt `prompt_id`.
    """
    measure = str(body.get("measure", ""))
    pair = [_pictures.pop((measure, arm), []) for arm in (ON, OFF)]
    if "seconds" not in body:
        return None
    seconds, stock = (_seconds(body, name) for name in ("seconds", "stock_seconds"))
    sampled = [run for run in runs.latest() if run["prompt_id"] == body.get("prompt_id")]
    ours = [run for run in sampled if run["role"] not in {role.value for role in VAE_ROLES}] or sampled
    if not ours or not any(run["counts"]["replays"] + run["counts"]["graph_calls"] for run in sampled):
        said = [reason for run in sampled for reason in (*run["reasons"], *run["lines"][1:])]
        why = said[0] if said else "no compiled model was called."
        raise UserError(f"Nothing ran compiled, so there is nothing to compare: {why}")
    run = max(ours, key=lambda each: float(each["seconds"]))
    found = Measurement(
        model=run["model"],
        structure=run["structure"],
        size=run["size"],
        device=runtime.device_name(),
        steps=run["steps"],
        seconds=statistics.median(seconds),
        stock_seconds=statistics.median(stock),
        mse=_mse(*pair),
        spread=max(_spread(seconds), _spread(stock)),
        prompts=min(len(seconds), len(stock)),
        file=run["file"],
        date=str(datetime.date.today()),
        bypass=next(iter(run["bypasses"]), ""),
    )
    _kept().set(found.device, (found.structure, found.size), found)
    text = Text("{figure}, measured on {date}", figure=found.text(), date=found.date)
    nodes = body.get("nodes")
    for node in nodes if isinstance(nodes, list) else ():
        messages.keep(text, str(node), str(body.get("workflow") or ""))
    return found


def _seconds(body: Mapping[str, Any], name: str) -> list[float]:
    values = body.get(name)
    if not isinstance(values, list) or not values or not all(_is_positive(value) for value in values):
        raise UserError(f'"{name}" of a measurement must be a list of seconds, each a number above 0.')
    return [float(value) for value in values]


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _spread(seconds: Sequence[float]) -> float:
    """Seconds from the lower to the upper quartile, so that one slow prompt of many does not count."""
    if len(seconds) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(seconds, n=4)
    return upper - lower


def _mse(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> float | None:
    """The mean squared error of the worst pair, in levels of 255; the largest possible one if shapes differ."""
    if not ours or not stock:
        return None
    if [each.shape for each in ours] != [each.shape for each in stock]:
        return LEVELS**2
    return max(float((one.float() - other).square().mean()) for one, other in zip(ours, stock, strict=True))


def of(run: Run) -> Measurement | None:
    """This device's measurement for the run's model, file, size and number of steps; None if there is none."""
    found = _kept().get(runtime.device_name(), (run.structure, run.size)) if run.structure else None
    is_same = found is not None and (found.file, found.steps) == (run.file, run.steps)
    return found if is_same else None


def here() -> list[dict[str, Any]]:
    """The measurements of this device, as JSON."""
    return [found.plain() for _, found in _kept().on(runtime.device_name())]


@functools.cache
def _kept() -> Tuner[Key, Measurement]:
    folder = runtime.cache().config.store_folder
    what = "the measurements against stock"
    return Tuner(what, Key, Measurement, folder and folder / "measured", lambda device: (device,))
