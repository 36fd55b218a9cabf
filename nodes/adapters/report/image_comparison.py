"""How far two batches of images are apart, in the terms that image papers use. Plain torch, and kornia's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Errors are told in the steps of an 8-bit picture: 1 is the smallest difference that a saved file can show.
LEVELS = 255.0
# What one float32 step adds to a difference of whole levels; a limit of 1 must let exactly one level pass.
_ROUNDING = 1e-3
# SSIM's window in the paper (Wang et al., 2004), with a Gaussian of 1.5 pixels.
_WINDOW = 11
# From no error to the largest: black, violet, red, orange, pale yellow. Green is in none of them.
_COLORS = ((0.0, 0.0, 0.0), (0.34, 0.06, 0.43), (0.76, 0.21, 0.27), (0.98, 0.55, 0.04), (0.99, 1.0, 0.75))
_NO_NUMBER = (0.0, 1.0, 0.0)


@dataclass(frozen=True)
class Scores:
    """One pair of images. Errors are absolute, in levels of 255; psnr is in dB, infinite for identical images.

    All four are NaN where an image holds values that are no numbers; `invalid` then says which image, and how many.
    """

    max_error: float
    mean_error: float
    psnr: float
    ssim: float
    invalid: str = ""


@dataclass(frozen=True)
class Comparison:
    """The scores of each pair of a batch, and the picture of where they differ."""

    shape: tuple[int, ...]
    scores: tuple[Scores, ...]
    heat_map: torch.Tensor  # (batch, height, width, 3), 0 to 1
    scale: float  # the error that the brightest colour stands for, in levels of 255
    window: int  # SSIM's window, in pixels

    @property
    def max_error(self) -> float:
        """The largest of the batch, in levels of 255; NaN if any image has no scores."""
        return _worst(max, [scores.max_error for scores in self.scores])

    @property
    def mean_error(self) -> float:
        """The mean over the batch, in levels of 255."""
        return sum(scores.mean_error for scores in self.scores) / len(self.scores)

    @property
    def psnr(self) -> float:
        """The lowest of the batch, in dB."""
        return _worst(min, [scores.psnr for scores in self.scores])

    @property
    def ssim(self) -> float:
        """The lowest of the batch, 1 for identical images."""
        return _worst(min, [scores.ssim for scores in self.scores])


def compare(image_a: torch.Tensor, image_b: torch.Tensor) -> Comparison:
    """Compare images pair by pair; both (batch, height, width, channels), 0 to 1.

    Raises ValueError where the shapes differ. Images with NaN or infinite values are compared, and said to be so.
    """
    _demand_equal_shapes(tuple(image_a.shape), tuple(image_b.shape))
    smallest = min(image_a.shape[1:3])
    window = min(_WINDOW, smallest if smallest % 2 else smallest - 1)
    scores, errors = [], []
    for one, other in zip(image_a, image_b, strict=True):
        # In double precision: SSIM subtracts squares that are nearly equal. One pair at a time, for memory's sake.
        a, b = (image.to("cpu", torch.float64) for image in (one, other))
        scores.append(_score(a, b, window))
        errors.append(((a - b).abs().amax(dim=-1) * LEVELS).float())
    error = torch.stack(errors)
    largest = float(error.where(error.isfinite(), 0).max())
    # Never brighter than one level deserves: otherwise rounding alone would look like a picture.
    scale = max(largest, 1.0)
    return Comparison(tuple(image_a.shape), tuple(scores), _colored(error / scale), scale, window)


def report(comparison: Comparison, max_error: float, min_psnr: float) -> str:
    """A table with a line for each pair, and what its numbers mean. The limits are as in `failure`."""
    batch, height, width, channels = comparison.shape
    lines = [
        f"{_counted(batch, 'image')} of {width}x{height} with {_counted(channels, 'channel')}, A against B",
        f"{'image':<7}{'max error':>11}{'mean error':>12}{'PSNR dB':>11}{'SSIM':>10}",
        *(_line(str(number), scores) for number, scores in enumerate(comparison.scores, 1)),
    ]
    notes = ["Errors are absolute, in levels of 255; PSNR and SSIM take values from 0 to 1."]
    if batch > 1:
        together = Scores(comparison.max_error, comparison.mean_error, comparison.psnr, comparison.ssim)
        lines.append(_line("all", together))
        notes.append("all: the largest max error, the mean of the mean errors, the lowest PSNR and SSIM.")
    if comparison.window < _WINDOW:
        size = f"{comparison.window}x{comparison.window}"
        notes.append(f"SSIM with a window of {size}: the usual {_WINDOW}x{_WINDOW} does not fit into the image.")
    brightest = f"{comparison.scale:.2f} of 255{' in every image' if batch > 1 else ''}"
    notes.append(f"Heat map: black is no error, pale yellow is {brightest}.")
    limits = _limits(max_error, min_psnr)
    if limits:
        notes.append(f"Within the limits: {limits}.")
    return "\n".join([*lines, "", *notes])


def failure(comparison: Comparison, max_error: float, min_psnr: float) -> str | None:
    """The sentence for images that are further apart than allowed; None where they are not.

    max_error: in levels of 255, and 255 allows anything. min_psnr: in dB, and 0 allows anything.
    """
    limits = _limits(max_error, min_psnr)
    if not limits:
        return None
    checks: tuple[Callable[[Scores], bool], ...] = (
        lambda scores: bool(scores.invalid),
        lambda scores: max_error < LEVELS and scores.max_error > max_error + _ROUNDING,
        lambda scores: min_psnr > 0 and scores.psnr < min_psnr,
    )
    batch = comparison.scores
    failed = [index for index, scores in enumerate(batch) if any(check(scores) for check in checks)]
    if not failed:
        return None
    worst = min(failed, key=lambda index: _rank(batch[index]))
    which = f"Image {worst + 1} of {len(batch)}"
    others = f" {len(failed)} of {len(batch)} images fail." if len(failed) > 1 else ""
    if batch[worst].invalid:
        return f"{which} cannot be compared: {batch[worst].invalid}. The limits were {limits}.{others}"
    return (
        f"{which} is too far from the other: max error {batch[worst].max_error:.2f} of 255, mean error "
        f"{batch[worst].mean_error:.4f} of 255, PSNR {batch[worst].psnr:.2f} dB, SSIM {batch[worst].ssim:.5f}. "
        f"The limits were {limits}.{others} To see where, set max_error to 255 and min_psnr to 0: then nothing fails."
    )


def _score(a: torch.Tensor, b: torch.Tensor, window: int) -> Scores:
    invalid = " and ".join(filter(None, (_invalid("image_a", a), _invalid("image_b", b))))
    if invalid:
        return Scores(math.nan, math.nan, math.nan, math.nan, invalid)
    # Here and not above: it takes a second, and a graph without this node should not wait for it.
    from kornia.metrics import psnr, ssim

    error = (a - b).abs() * LEVELS
    planes = (a.movedim(-1, 0)[None], b.movedim(-1, 0)[None])
    # eps=0: the metric as published. C1 and C2 keep the division from zero.
    similarity = ssim(*planes, window_size=window, max_val=1.0, eps=0.0, padding="valid")
    return Scores(float(error.max()), float(error.mean()), float(psnr(*planes, 1.0)), float(similarity.mean()))


def _invalid(name: str, image: torch.Tensor) -> str:
    wrong = int((~image.isfinite()).sum())
    return f"{name} holds {wrong} NaN or infinite values (of {image.numel()})" if wrong else ""


def _colored(share: torch.Tensor) -> torch.Tensor:
    """0..1 -> colours; (batch, height, width) -> (batch, height, width, 3)."""
    colors = torch.tensor(_COLORS)
    at = share.where(share.isfinite(), 0).clamp(0, 1) * (len(colors) - 1)
    lower = at.floor().long().clamp(max=len(colors) - 2)
    mixed = torch.lerp(colors[lower], colors[lower + 1], (at - lower)[..., None])
    return torch.where(share.isfinite()[..., None], mixed, torch.tensor(_NO_NUMBER))


def _demand_equal_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    if a == b and min(a) > 0:
        return
    told = f"image_a is {_told(a)}, image_b is {_told(b)}"
    if a == b:
        raise ValueError(f"There is nothing to compare: {told}.")
    remedies = {
        "scale one of them with Upscale Image": a[1:3] != b[1:3],
        "choose as many from each with Get Image from Batch": a[0] != b[0],
        "take an alpha channel off with Split Image with Alpha": a[3] != b[3],
    }
    remedy = ", and ".join(text for text, is_needed in remedies.items() if is_needed)
    raise ValueError(f"The two inputs cannot be compared: {told}. Make them equal: {remedy}.")


def _told(shape: tuple[int, ...]) -> str:
    batch, height, width, channels = shape
    return f"{_counted(batch, 'image')} of {width}x{height} with {_counted(channels, 'channel')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _line(name: str, scores: Scores) -> str:
    if scores.invalid:
        return f"{name:<7}no numbers: {scores.invalid}; green in the heat map"
    psnr = "identical" if scores.psnr == math.inf else f"{scores.psnr:.2f}"
    return f"{name:<7}{scores.max_error:>11.2f}{scores.mean_error:>12.4f}{psnr:>11}{scores.ssim:>10.5f}"


def _limits(max_error: float, min_psnr: float) -> str:
    limits = [f"max_error {max_error:g} of 255"] if max_error < LEVELS else []
    limits += [f"min_psnr {min_psnr:g} dB"] if min_psnr > 0 else []
    return ", ".join(limits)


def _rank(scores: Scores) -> float:
    """The lowest is the worst."""
    return -math.inf if scores.invalid else scores.psnr


def _worst(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else choose(values)
