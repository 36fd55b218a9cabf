"""Measure how much two batches of images differ: max and mean error, PSNR, SSIM. Torch, and kornia for the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....compile_cache.texts import Text

# Errors are in levels of an 8-bit image: 1 is the smallest difference that a saved file can show.
LEVELS = 255.0
# Tolerance for float32 rounding, in levels: with a limit of 1, a difference of exactly one level must pass.
_ROUNDING = 1e-3
# SSIM's window in the paper (Wang et al., 2004), in pixels. Its weights are a Gaussian with a sigma of 1.5 pixels.
_WINDOW = 11
# The heat map from no error to the largest: black, violet, red, orange, pale yellow. No mix of these is pure green.
_COLORS = ((0.0, 0.0, 0.0), (0.34, 0.06, 0.43), (0.76, 0.21, 0.27), (0.98, 0.55, 0.04), (0.99, 1.0, 0.75))
_NAN_COLOR = (0.0, 1.0, 0.0)
_NO_LIMITS = "To see where, set max_error to 255 and min_psnr to 0: then nothing fails."


@dataclass(frozen=True)
class Scores:
    """The scores of one pair. Errors are absolute, in levels of 255. psnr: in dB, infinite for identical images.

    All four are NaN if an image has NaN or infinite values; `invalid` then says which image, and how many values.
    """

    max_error: float
    mean_error: float
    psnr: float
    ssim: float
    invalid: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison(Scores):
    """The scores of a whole batch: the largest max error, the mean of the mean errors, the lowest PSNR and SSIM; all
    NaN if any image has NaN or infinite values. `scores` has those of each pair.
    """

    shape: tuple[int, ...]
    scores: tuple[Scores, ...]
    heat_map: torch.Tensor  # (batch, height, width, 3), 0 to 1
    scale: float  # the error shown in the brightest colour, in levels of 255
    window: int  # SSIM's window, in pixels


def compare(image_a: torch.Tensor, image_b: torch.Tensor) -> Comparison:
    """Compare two batches pair by pair. image_a, image_b: (batch, height, width, channels), values from 0 to 1.

    Raises ValueError if the shapes differ. NaN or infinite values raise nothing: see `Scores.invalid`.
    """
    _check_equal_shapes(tuple(image_a.shape), tuple(image_b.shape))
    smallest = min(image_a.shape[1:3])
    window = min(_WINDOW, smallest if smallest % 2 else smallest - 1)
    scores, errors = [], []
    for one, other in zip(image_a, image_b, strict=True):
        # Double precision, because SSIM subtracts squares that are nearly equal. One pair at a time saves memory.
        a, b = (image.to("cpu", torch.float64) for image in (one, other))
        scores.append(_score(a, b, window))
        errors.append(((a - b).abs().amax(dim=-1) * LEVELS).float())
    error = torch.stack(errors)
    largest = float(error.where(error.isfinite(), 0).max())
    # At least one level: otherwise an error of pure rounding noise would be shown in the brightest colour.
    scale = max(largest, 1.0)
    return Comparison(
        max_error=_worst(max, [pair.max_error for pair in scores]),
        mean_error=sum(pair.mean_error for pair in scores) / len(scores),
        psnr=_worst(min, [pair.psnr for pair in scores]),
        ssim=_worst(min, [pair.ssim for pair in scores]),
        shape=tuple(image_a.shape),
        scores=tuple(scores),
        heat_map=_colored(error / scale),
        scale=scale,
        window=window,
    )


def report(comparison: Comparison, max_error: float, min_psnr: float) -> Text:
    """A table with a line for each pair, and an explanation of its numbers. The limits are those of `failure`."""
    batch = len(comparison.scores)
    lines = [
        Text("{images}, A against B", images=_described(comparison.shape)),
        f"{'image':<7}{'max error':>11}{'mean error':>12}{'PSNR dB':>11}{'SSIM':>10}",
        *(_line(str(number), scores) for number, scores in enumerate(comparison.scores, 1)),
    ]
    legend = [Text("Errors are absolute, in levels of 255. PSNR and SSIM are computed on values from 0 to 1.")]
    if batch > 1:
        lines.append(_line("all", comparison))
        legend.append(Text("all: the largest max error, the mean of the mean errors, the lowest PSNR and SSIM."))
    if comparison.window < _WINDOW:
        window, usual = (f"{side}x{side}" for side in (comparison.window, _WINDOW))
        text = "SSIM with a window of {window}: the usual {usual} does not fit into the image."
        legend.append(Text(text, window=window, usual=usual))
    brightest = f"{comparison.scale:.2f}"
    text = "Heat map: black is no error, pale yellow is {brightest} of 255."
    if batch > 1:
        text = "Heat map: black is no error, pale yellow is {brightest} of 255 in every image."
    legend.append(Text(text, brightest=brightest))
    limits = _limits(max_error, min_psnr)
    if limits:
        legend.append(Text("Within the limits: {limits}.", limits=limits))
    return Text.joined("\n", [*lines, "", *legend])


def failure(comparison: Comparison, max_error: float, min_psnr: float) -> str | None:
    """The error text if a pair is outside the limits; None if all pairs are within them.

    max_error: in levels of 255; 255 is no limit. min_psnr: in dB; 0 is no limit.
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
    others = f", the worst of {len(failed)} that fail," if len(failed) > 1 else ""
    which = f"Image {worst + 1} of {len(batch)}{others}"
    if batch[worst].invalid:
        return f"{which} cannot be compared: {batch[worst].invalid}. {_NO_LIMITS}"
    return (
        f"{which} is outside the limits ({limits}): max error {batch[worst].max_error:.2f} of 255, mean error "
        f"{batch[worst].mean_error:.4f} of 255, PSNR {batch[worst].psnr:.2f} dB, SSIM {batch[worst].ssim:.5f}. "
        f"{_NO_LIMITS}"
    )


def _score(a: torch.Tensor, b: torch.Tensor, window: int) -> Scores:
    invalid = " and ".join(filter(None, (_invalid("image_a", a), _invalid("image_b", b))))
    if invalid:
        return Scores(math.nan, math.nan, math.nan, math.nan, invalid)
    # Imported here because it takes a second, and only this node needs it.
    from kornia.metrics import psnr, ssim

    error = (a - b).abs() * LEVELS
    planes = (a.movedim(-1, 0)[None], b.movedim(-1, 0)[None])
    # eps=0 is the published metric. Its constants C1 and C2 already prevent a division by zero.
    similarity = ssim(*planes, window_size=window, max_val=1.0, eps=0.0, padding="valid")
    return Scores(float(error.max()), float(error.mean()), float(psnr(*planes, 1.0)), float(similarity.mean()))


def _invalid(name: str, image: torch.Tensor) -> str:
    wrong = int((~image.isfinite()).sum())
    return f"{name} holds {wrong} NaN or infinite values (of {image.numel()})" if wrong else ""


def _colored(share: torch.Tensor) -> torch.Tensor:
    """Colours for values from 0 to 1: (batch, height, width) -> (batch, height, width, 3)."""
    colors = torch.tensor(_COLORS)
    at = share.where(share.isfinite(), 0).clamp(0, 1) * (len(colors) - 1)
    lower = at.floor().long().clamp(max=len(colors) - 2)
    mixed = torch.lerp(colors[lower], colors[lower + 1], (at - lower)[..., None])
    return torch.where(share.isfinite()[..., None], mixed, torch.tensor(_NAN_COLOR))


def _check_equal_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    if a == b and min(a) > 0:
        return
    shapes = f"image_a is {_described(a)}, image_b is {_described(b)}"
    if a == b:
        raise ValueError(f"There is nothing to compare: {shapes}.")
    remedies = {
        "scale one with Upscale Image": a[1:3] != b[1:3],
        "select as many from each with Get Image from Batch": a[0] != b[0],
        "remove the alpha channel with Split Image with Alpha": a[3] != b[3],
    }
    remedy = ", and ".join(text for text, is_needed in remedies.items() if is_needed)
    raise ValueError(f"The two inputs cannot be compared: {shapes}. Make them equal: {remedy}.")


def _described(shape: tuple[int, ...]) -> Text:
    batch, height, width, channels = shape
    text = "{batch} images of {size} with {channels} channels"
    return Text(text, batch=batch, size=f"{width}x{height}", channels=channels)


def _line(name: str, scores: Scores) -> str:
    if scores.invalid:
        return f"{name:<7}no scores: {scores.invalid}; green in the heat map"
    psnr = "identical" if scores.psnr == math.inf else f"{scores.psnr:.2f}"
    return f"{name:<7}{scores.max_error:>11.2f}{scores.mean_error:>12.4f}{psnr:>11}{scores.ssim:>10.5f}"


def _limits(max_error: float, min_psnr: float) -> str:
    limits = [f"max_error {max_error:g} of 255"] if max_error < LEVELS else []
    limits += [f"min_psnr {min_psnr:g} dB"] if min_psnr > 0 else []
    return ", ".join(limits)


def _rank(scores: Scores) -> float:
    """Sort key: the worst pair comes first."""
    return -math.inf if scores.invalid else scores.psnr


def _worst(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    """`choose(values)`, or NaN if any value is NaN: `min` and `max` would depend on the order then."""
    return math.nan if any(map(math.isnan, values)) else choose(values)
