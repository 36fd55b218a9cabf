"""OneDiff's node that compares images."""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy_api.latest import io

from ...compile_cache.errors import UserError, excerpt
from ..adapters.comfyui.messages import on_node
from ..adapters.report.image_comparison import LEVELS, compare, report

_SWITCH = ("enable", "disable")
_TOLERANCE = "1e-4"


def compare_images(
    node_id: str | None,
    images1: Any,
    images2: Any,
    ssim_threshold: str,
    raise_if_diff: str,
    image_id: str,
    rtol: str,
    atol: str,
) -> io.NodeOutput:
    """Raises ValueError if shapes differ or images differ too much, UserError for a limit that is not a number."""
    if raise_if_diff not in _SWITCH and image_id in _SWITCH:
        # Saved by OneDiff before March 2024: workflows store values by position, and rtol and atol were the first two.
        rtol, atol, raise_if_diff, image_id = ssim_threshold, raise_if_diff, image_id, rtol
    scores = compare(images1, images2)
    text = report(scores, LEVELS, 0.0)
    if raise_if_diff == "enable":
        problem = _problem(images1, images2, scores.ssim, ssim_threshold, rtol, atol)
        if problem:
            raise ValueError(f"The images differ: {problem}.\n{text}")
    return io.NodeOutput(ui=on_node(text))


def _problem(images1: Any, images2: Any, ssim: float, ssim_threshold: str, rtol: str, atol: str) -> str:
    """Name the violated limit; empty if none. With a tolerance it is torch.allclose's, as in OneDiff's old versions."""
    if rtol or atol:
        relative, absolute = _number("rtol", rtol or _TOLERANCE), _number("atol", atol or _TOLERANCE)
        same = torch.allclose(images1, images2, rtol=relative, atol=absolute)
        return "" if same else f"not all values are within rtol {relative:g} and atol {absolute:g}"
    limit = _number("ssim_threshold", ssim_threshold)
    return "" if ssim > limit else f"SSIM {ssim:.4f} is not above the limit {limit:g}"


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    raise UserError(f"{name} '{excerpt(text)}' is no number; choose one from 0 to 1, for example 0.9.")
